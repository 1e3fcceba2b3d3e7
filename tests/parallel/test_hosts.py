"""Hosts as network namespaces: real launches over ssh, a host that is cut off, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import hosts
import pytest

MODULE = Path(hosts.__file__)
LACK = hosts.missing()
pytestmark = pytest.mark.skipif(LACK is not None, reason=LACK or "")

SUMS = """
import os, socket, sys, time
import horovod.torch as hvd
import torch

hvd.init()
name = socket.gethostname()
for step in range(int(sys.argv[1])):
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum, name="sum").item()
    if step == 0:
        print("sum", total, name, socket.gethostbyname(name), os.environ["HOROVOD_LOCAL_RANK"], flush=True)
    time.sleep(0.01)
print("done", flush=True)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "sums.py"
    path.write_text(SUMS)
    return path


def traces():
    """All that hosts could leave on the machine."""
    return (
        [line.split()[0] for line in hosts._command("ip", "netns", "list").splitlines()],
        sorted(path.name for path in hosts.NETNS.glob("*")),
        sorted(path.name for path in hosts.STATE.glob("*")),
        hosts._command("ip", "-brief", "link"),
        sorted(Path.home().glob(".ssh/*")),
    )


def wait_until(condition, seconds=30):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come about in time"
        time.sleep(0.1)


def test_ranks_on_two_hosts_agree_and_nothing_is_left(script):
    before = traces()
    with hosts.Hosts(2) as pair:
        run = pair.horovodrun([sys.executable, script, "3"], ranks=2, timeout=200)
        assert run.returncode == 0, run.output
        said = sorted(re.findall(r"sum (\S+) (\S+) (\S+) (\d)", run.output))
        assert said == sorted(
            ("10.0", host.name, host.address, local) for host in pair for local in ("0", "1")
        )
        assert pair.processes() == []
        assert min(pair.sent(0), pair.sent(1)) > 1000  # it did cross the links
        assert pair[0].run(["cat", "/proc/net/route"]).stdout.count("\n") == 2  # one net, no way out
    assert traces() == before


def test_a_host_that_is_cut_off_ends_the_run_on_every_other(script):
    before = traces()
    with hosts.Hosts(3) as trio:
        options = ["--gloo-timeout-seconds", "10"]
        process = trio.start_horovodrun([sys.executable, script, "1000000"], options=options)
        lines = []
        while sum("sum" in line for line in lines) < 3:
            line = process.stdout.readline()
            assert line, "".join(lines)
            lines.append(line)
        trio.cut(2)
        output, _ = process.communicate(timeout=120)
        assert process.returncode != 0
        assert "done" not in output
        # Horovod says on the living ranks what happened, and the launcher which process went first
        assert re.search(r"\[[01]\]<std(err|out)>:.*(HorovodInternalError|[Tt]imed? ?out|closed)", output), (
            output
        )
        assert "processes exited with non-zero status" in output
        wait_until(lambda: trio[0].processes() == [trio._daemons[0].pid])
        wait_until(lambda: trio[1].processes() == [trio._daemons[1].pid])
        wait_until(lambda: trio[2].processes() == [trio._daemons[2].pid], 60)  # it gives up by itself
        trio.mend(2)
        assert trio[0].run(["ssh", "h3", "hostname"]).stdout.strip() == "h3"
    assert traces() == before


def test_rate_of_a_link():
    receive = (
        "import socket\n"
        "server = socket.create_server(('', 5000)); print('ready', flush=True)\n"
        "connection, _ = server.accept()\n"
        "while connection.recv(1 << 16): pass\n"
    )
    send = (
        "import socket, time\n"
        "connection = socket.create_connection(('h2', 5000)); connection.sendall(bytes(1 << 20))\n"
        "connection.shutdown(socket.SHUT_WR); began = time.monotonic(); connection.recv(1)\n"
    )
    with hosts.Hosts(2, rate=20e6, sshd=False) as pair:
        server = subprocess.Popen(
            pair[1].command([sys.executable, "-c", receive]), stdout=subprocess.PIPE, text=True
        )
        assert server.stdout.readline() == "ready\n"
        began = time.monotonic()
        pair[0].run([sys.executable, "-c", send], check=True)
        server.wait(timeout=20)
        server.stdout.close()
        # A slow machine only makes it slower: 1 MiB less the burst takes 0.37 s at 20 Mbit/s.
        assert time.monotonic() - began > 0.9 * ((1 << 20) - (1 << 17)) * 8 / 20e6


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_hosts_go_when_their_process_is_killed(number):
    before = traces()
    program = (
        f"import sys, time; sys.path.insert(0, {str(MODULE.parent)!r}); import hosts\n"
        "with hosts.Hosts(2, sshd=False) as pair:\n"
        "    import subprocess; subprocess.Popen(pair[1].command(['sleep', '1000']))\n"
        "    print('up', flush=True); time.sleep(1000)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    assert len(traces()[0]) == len(before[0]) + 3
    process.send_signal(number)
    process.wait(timeout=20)
    process.stdout.close()
    wait_until(lambda: traces() == before)


def test_cleanup_takes_what_nobody_holds_and_leaves_the_living():
    before = traces()
    with hosts.Hosts(1, sshd=False) as living:
        orphan = f"{hosts.PREFIX}0dd-h1"
        hosts._command("ip", "netns", "add", orphan)
        (hosts.NETNS / orphan).mkdir(parents=True)
        said = subprocess.run([sys.executable, MODULE, "cleanup"], capture_output=True, text=True)
        assert said.stdout == "removed: 0dd\n"
        assert living[0].run(["true"]).returncode == 0
    assert traces() == before


@pytest.mark.parametrize("arguments", [{"n": 0}, {"n": 201}, {"n": 2, "rate": 5}])
def test_wrong_arguments(arguments):
    with pytest.raises(ValueError, match=r"(n|rate)=\d+ must be"):
        hosts.Hosts(**arguments)


def test_without_root_it_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeError, match="need root"), hosts.Hosts(1):
        pass
