"""doctor --hosts over real ssh between hosts that are well, and that each have a fault of their own."""

import importlib.metadata
import json
import os
import sys
from pathlib import Path

import hosts
import pytest

REPOSITORY = Path(__file__).parents[2]
LACK = hosts.missing()
pytestmark = pytest.mark.skipif(LACK is not None, reason=LACK or "")


def doctor(machines, *words, names=None):
    names = names or ",".join(host.name for host in machines)
    command = [sys.executable, "-m", "hvd_adaptive.cli.main", "doctor", "--hosts", names, "--seconds", "0.5"]
    return machines[0].run(
        [*command, *words], env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"}, timeout=120
    )


def test_hosts_that_are_well():
    with hosts.Hosts(3, rate=50e6) as trio:
        answer = doctor(trio, "--json")
        assert answer.returncode == 0, answer.stdout + answer.stderr
        told = json.loads(answer.stdout)
        assert {finding["state"] for finding in told["findings"]} == {"ok"}
        assert set(told["hosts"]) == {"h1", "h2", "h3"}
        assert told["hosts"]["h2"]["hostname"] == "h2" and told["hosts"]["h2"]["resolved"] == trio[1].address
        ring = [link for link in told["links"] if link["bandwidth"] is not None]
        assert [(link["source"], link["target"]) for link in ring] == [
            ("h1", "h2"),
            ("h2", "h3"),
            ("h3", "h1"),
        ]
        assert len(told["links"]) == 6
        # never more than the link carries; a busy machine may carry less
        assert all(0 < link["bandwidth"] < 1.15 * 50e6 for link in ring)
        assert trio.processes() == []


def test_each_fault_with_its_remedy(tmp_path):
    with hosts.Hosts(5) as group:
        # h2: Debian's entry for the own hostname
        names = hosts.NETNS / group[1].namespace / "hosts"
        names.write_text(names.read_text().replace(f"{group[1].address} h2", "127.0.1.1 h2"))
        # h3: jumbo packets that the bridge's port drops, and a slow link
        hosts._command("ip", "-n", group[2].namespace, "link", "set", "eth0", "mtu", "9000")
        # h4: another NumPy
        metadata = Path(str(importlib.metadata.distribution("numpy").locate_file("."))).glob(
            "numpy-*.dist-info"
        )
        path = next(metadata) / "METADATA"
        version = importlib.metadata.version("numpy")
        other = tmp_path / "METADATA"
        other.write_text(path.read_text().replace(f"Version: {version}", "Version: 2.0.1"))
        sshd = str(group._daemons[3].pid)
        hosts._command("nsenter", "--target", sshd, "--mount", "mount", "--bind", str(other), str(path))
        # h5: no sshd
        group._daemons[4].terminate()
        group._daemons[4].wait()

        answer = doctor(group, "--json")
        assert answer.returncode == 1, answer.stderr
        found = {finding["name"]: finding for finding in json.loads(answer.stdout)["findings"]}
        faults = {name for name, finding in found.items() if finding["state"] == "missing"}
        assert (
            {"ssh", "hostnames", "NumPy", "MTU", "packets"}
            <= faults
            <= {*("ssh", "hostnames", "NumPy", "MTU", "packets", "bandwidth")}
        )
        assert "refused" in found["ssh"]["found"] and "start sshd on h5" in found["ssh"]["remedy"]
        assert found["hostnames"]["remedy"] == f"on h2, in /etc/hosts: {group[1].address} h2"
        assert found["NumPy"]["found"] == f"{version}: h1, h2, h3\n2.0.1: h4"
        assert found["MTU"]["remedy"] == "on h3: ip link set INTERFACE mtu 1500"
        assert all(line.startswith("h3 to") for line in found["packets"]["found"].splitlines())


def test_interfaces_of_different_names_and_a_host_that_is_cut_off():
    with hosts.Hosts(3) as trio:
        for words in (["eth0", "down"], ["eth0", "name", "ens5"], ["ens5", "up"]):
            hosts._command("ip", "-n", trio[1].namespace, "link", "set", *words)
        trio.cut(2)
        answer = doctor(trio)
        assert answer.returncode == 1, answer.stderr
        text = " ".join(answer.stdout.split())
        assert "ens5: h2" in text and "ip link set OLD name NEW" in text
        assert "check that h3 is up" in text
