"""Several hosts on one machine: network namespaces joined by a bridge, with an sshd each.

    with Hosts(4, rate=100e6) as hosts:                     # 4 hosts, each link 100 Mbit/s both ways
        run = hosts.horovodrun([sys.executable, "train.py"], ranks=1, timeout=300)
        print(run.returncode, run.output)                   # the real launcher, from h1, over ssh

    with Hosts(2) as hosts:                                 # links as fast as the machine
        process = hosts.start_horovodrun([sys.executable, "train.py"])
        hosts.cut(1)                                        # h2's cable is pulled: packets vanish silently
        output, _ = process.communicate(timeout=120)
        print(hosts[0].run(["ping", "-c1", "h2"]).stdout)   # any command, on any host

The hosts are named h1, h2, ... and have the addresses 10.77.0.1, 10.77.0.2, ..., which exist only in
the namespaces, as do the bridge and the links: the machine's own network and ~/.ssh are not touched, and
nothing outside is reached.  Files, users and processes are the machine's.  Every host has its own hostname,
which resolves to the host's real address, as Horovod's Gloo needs it.

Needs root, iproute2 (``ip``, ``tc``), util-linux (``unshare``) and ``sshd``: ``missing()`` says in a sentence
what is not there.  Everything is removed at the end, even if this process is killed: a second process waits
for that.  ``python benchmarks/network/hosts.py cleanup`` removes what is left if both were killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

PREFIX = "hvda-"
"""With this the names of our network namespaces begin."""
STATE = Path("/run/hvd-adaptive-hosts")
"""A folder for each living ``Hosts``: its lock, its keys and its logs."""
NETNS = Path("/etc/netns")
"""Here ``ip netns exec`` finds the files that a namespace sees in /etc."""
SUBNET = "10.77.0"
SSHD = "/usr/sbin/sshd"

_SSH_CONFIG = """\
Host *
    IdentityFile {folder}/user
    IdentitiesOnly yes
    UserKnownHostsFile /dev/null
    StrictHostKeyChecking no
    LogLevel ERROR
    ConnectTimeout 10
    # a host that is cut off is noticed by whoever is logged in there
    ServerAliveInterval 5
    ServerAliveCountMax 3
"""
_SSHD_CONFIG = """\
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
PidFile none
MaxStartups 100
MaxSessions 100
ClientAliveInterval 5
ClientAliveCountMax 3
"""


def missing() -> str | None:
    """A sentence that says what ``Hosts`` needs and this machine lacks, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "Hosts as network namespaces need root on Linux: run this with sudo."
    tools = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "ssh-keygen": "openssh-client"}
    packages = {package for tool, package in tools.items() if shutil.which(tool) is None}
    if not Path(SSHD).exists():
        packages.add("openssh-server")
    if packages:
        names = " ".join(sorted(packages))
        return f"Hosts as network namespaces need {names}: run apt-get install {names}"
    trial = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "trial0", "type", "veth", "peer", "name", "trial1"],
        capture_output=True,
        text=True,
    )
    if trial.returncode != 0:
        return f"Network namespaces with links are not permitted here: {trial.stderr.strip()}"
    return None


@dataclass(frozen=True)
class Host:
    """One host: its name, its address and the network namespace that it is."""

    name: str
    address: str
    namespace: str

    def command(self, words: Sequence[str | Path]) -> list[str]:
        """The command that runs ``words`` on this host."""
        inside = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*enter, "sh", "-c", inside, self.name, *map(str, words)]

    def run(self, words: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
        """``subprocess.run`` on this host, with its output captured as text."""
        settings = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(self.command(words), **{**settings, **options})

    def processes(self) -> list[int]:
        """The ids of all processes on this host."""
        return _pids(self.namespace)


@dataclass(frozen=True)
class Run:
    """What a launch came to.  ``returncode`` is None if it ran past its time."""

    returncode: int | None
    output: str
    seconds: float


class Hosts:
    """``n`` hosts, from ``with`` to its end.

    Args:
        n: number of hosts, 1 to 200.
        rate: of each host's link in bits per second, each way; None: as fast as the machine.
        sshd: start an sshd on each, so that root may log in from each to each.

    Raises:
        RuntimeError: this machine cannot have them; the message says what is missing.
    """

    def __init__(self, n: int, rate: float | None = None, sshd: bool = True) -> None:
        if not 1 <= n <= 200:
            raise ValueError(f"n={n} must be from 1 to 200 hosts.")
        if rate is not None and not rate >= 1e5:
            raise ValueError(f"rate={rate} must be at least 1e5 bits per second, or None.")
        self.rate = rate
        self._sshd = sshd
        self._id = secrets.token_hex(3)
        self.folder = STATE / self._id
        self._switch = f"{PREFIX}{self._id}-switch"
        self._hosts = [Host(f"h{i}", f"{SUBNET}.{i}", f"{PREFIX}{self._id}-h{i}") for i in range(1, n + 1)]
        self._daemons: list[subprocess.Popen[str]] = []
        self._guard: subprocess.Popen[bytes] | None = None

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __enter__(self) -> Hosts:
        lack = missing()
        if lack is not None:
            raise RuntimeError(lack)
        cleanup()
        self._start_guard()
        try:
            self._make_network()
            if self._sshd:
                self._start_sshd()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process on the hosts and remove them."""
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        self._guard.stdin.close()  # which the guard takes for our end
        self._guard.wait()
        self._guard = None
        for daemon in self._daemons:
            daemon.wait()
        self._daemons.clear()

    def horovodrun(
        self,
        words: Sequence[str | Path],
        ranks: int = 1,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout: float = 300,
    ) -> Run:
        """Run ``words`` under the real launcher, from the first host, ``ranks`` on each host.

        Args:
            options: more options of horovodrun.
            env: variables to add; horovodrun hands its environment on to every rank.
            timeout: seconds, after which the run is ended.
        """
        began = time.monotonic()
        process = self.start_horovodrun(words, ranks, options, env, cwd)
        try:
            output, _ = process.communicate(timeout=timeout)
            return Run(process.returncode, output, time.monotonic() - began)
        except subprocess.TimeoutExpired:
            process.terminate()  # horovodrun ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            self.end_processes()
            output, _ = process.communicate()
            return Run(None, output, time.monotonic() - began)
        finally:
            self.end_processes()

    def start_horovodrun(
        self,
        words: Sequence[str | Path],
        ranks: int = 1,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> subprocess.Popen[str]:
        """As ``horovodrun``, but return at once; stdout and stderr come in one stream."""
        launcher = [
            *(sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(ranks * len(self))),
            *("-H", ",".join(f"{host.name}:{ranks}" for host in self)),
            # Naming the interface saves the seconds of looking for one.  What is found out of h1, h2, ...
            # is not to be kept for the next hosts of these names.
            *("--network-interfaces", "eth0", "--disable-cache", "--start-timeout", "120", *options),
        ]
        return subprocess.Popen(
            self[0].command([*launcher, *words]),
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def cut(self, index: int) -> None:
        """Pull the cable of a host: packets to and from it vanish, and nobody is told."""
        self._ip(self._switch, "link", "set", self[index].name, "down")

    def mend(self, index: int) -> None:
        """Plug the cable of a host in again."""
        self._ip(self._switch, "link", "set", self[index].name, "up")

    def set_rate(self, rate: float | None) -> None:
        """Change the rate of every link, in bits per second; None: as fast as the machine."""
        self.rate = rate
        for host in self:
            for namespace, device in ((host.namespace, "eth0"), (self._switch, host.name)):
                _limit(namespace, device, rate)

    def sent(self, index: int) -> int:
        """Bytes that a host has put on its link so far, headers included."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(self[index].run(["cat", path], check=True).stdout)

    def processes(self) -> list[int]:
        """The ids of what runs on the hosts, the waiting sshds apart."""
        daemons = {daemon.pid for daemon in self._daemons}
        return [pid for host in self for pid in host.processes() if pid not in daemons]

    def end_processes(self) -> None:
        """End everything that runs on the hosts; the sshds go on waiting."""
        _end(self.processes)

    def _start_guard(self) -> None:
        """The process that removes everything once our end of its pipe is closed, however we end."""
        unlocked = STATE / f".{self._id}"  # a name that cleanup() passes over
        unlocked.mkdir(parents=True, mode=0o700)
        with (unlocked / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # shared with the guard, and held until it ends
            unlocked.rename(self.folder)
            self._guard = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "guard", self._id],
                stdin=subprocess.PIPE,
                pass_fds=[lock.fileno()],
                start_new_session=True,
                cwd="/",
            )

    def _make_network(self) -> None:
        _command("ip", "netns", "add", self._switch)
        self._ip(self._switch, "link", "add", "bridge", "type", "bridge")
        self._ip(self._switch, "link", "set", "bridge", "up")
        names = "".join(f"{host.address} {host.name}\n" for host in self)
        for host in self:
            _command("ip", "netns", "add", host.namespace)
            folder = NETNS / host.namespace
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            (folder / "hostname").write_text(f"{host.name}\n")
            # IPv6 would bring addresses that no hosts file knows
            _inside(host.namespace, "sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 || true")
            link = ["link", "add", "eth0", "netns", host.namespace, "type", "veth"]
            _command("ip", *link, "peer", "name", host.name, "netns", self._switch)
            self._ip(self._switch, "link", "set", host.name, "master", "bridge", "up")
            self._ip(host.namespace, "link", "set", "lo", "up")
            self._ip(host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            self._ip(host.namespace, "link", "set", "eth0", "up")
        if self.rate is not None:
            self.set_rate(self.rate)

    def _start_sshd(self) -> None:
        for key in ("host", "user"):
            _command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(self.folder / key))
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd will not start without
        Path("/etc/ssh").mkdir(exist_ok=True)
        for host in self:
            folder = NETNS / host.namespace / "ssh"
            folder.mkdir()
            (folder / "ssh_config").write_text(_SSH_CONFIG.format(folder=self.folder))
            (folder / "sshd_config").write_text(_SSHD_CONFIG.format(folder=self.folder))
            log = self.folder / f"sshd-{host.name}.log"
            self._daemons.append(
                subprocess.Popen(
                    host.command([SSHD, "-D", "-f", "/etc/ssh/sshd_config", "-E", log]),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,
                )
            )
        for host in self:
            self._wait_for_sshd(host)

    def _wait_for_sshd(self, host: Host) -> None:
        until = time.monotonic() + 20
        while True:
            answer = self[0].run(["ssh", host.name, "true"])
            if answer.returncode == 0:
                return
            if time.monotonic() > until:
                log = (self.folder / f"sshd-{host.name}.log").read_text()
                raise RuntimeError(f"ssh to {host.name} does not work: {answer.stderr.strip()}\n{log}")
            time.sleep(0.1)

    def _ip(self, namespace: str, *words: str) -> None:
        _command("ip", "-n", namespace, *words)


def _limit(namespace: str, device: str, rate: float | None) -> None:
    """Let ``device`` send at most ``rate`` bits per second."""
    if rate is None:
        _inside(namespace, "tc", "qdisc", "del", "dev", device, "root", check=False)
        return
    # What may go at once: the largest packet of the stack, or 4 ms, one tick of a kernel's coarsest clock.
    burst = max(1 << 17, int(rate / 8 * 0.004))
    words = ("rate", f"{int(rate)}bit", "burst", str(burst), "latency", "50ms")
    _inside(namespace, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *words)


def _command(*words: str, check: bool = True) -> str:
    answer = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if check and answer.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {(answer.stderr or answer.stdout).strip()}")
    return answer.stdout


def _inside(namespace: str, *words: str, check: bool = True) -> None:
    _command("ip", "netns", "exec", namespace, *words, check=check)


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _command("ip", "netns", "pids", namespace, check=False).split()]


def _end(pids: Any, patience: float = 5.0) -> None:
    """End what ``pids()`` lists: ask, and after ``patience`` seconds no longer ask."""
    for number, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        for pid in pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + wait
        while pids():
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        else:
            return


def _namespaces(ident: str) -> list[str]:
    names = [line.split()[0] for line in _command("ip", "netns", "list").splitlines() if line.strip()]
    return [name for name in names if name.startswith(f"{PREFIX}{ident}-")]


def _remove(ident: str) -> None:
    """Remove the hosts of one ``Hosts``, and what runs on them."""
    _end(lambda: [pid for name in _namespaces(ident) for pid in _pids(name)], patience=2.0)
    for name in _namespaces(ident):
        _command("ip", "netns", "del", name, check=False)  # its links go with it
    for folder in NETNS.glob(f"{PREFIX}{ident}-*"):
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        NETNS.rmdir()  # only where it is empty
    shutil.rmtree(STATE / ident, ignore_errors=True)
    with contextlib.suppress(OSError):
        STATE.rmdir()


def cleanup() -> list[str]:
    """Remove the hosts whose process and guard are both gone; return their names' middle parts."""
    found = [line.split()[0] for line in _command("ip", "netns", "list").splitlines() if line.strip()]
    idents = {name.removeprefix(PREFIX).rpartition("-")[0] for name in found if name.startswith(PREFIX)}
    idents |= {folder.name for folder in STATE.glob("[!.]*")}
    removed = []
    for ident in sorted(idents):
        with _lock_of(ident) as lock:
            if lock is not None:
                _remove(ident)
                removed.append(ident)
    return removed


@contextlib.contextmanager
def _lock_of(ident: str) -> Iterator[IO[str] | None]:
    """The lock of one ``Hosts``, or None while its process or guard holds it."""
    folder = STATE / ident
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
        else:
            yield lock


def _stand_guard(ident: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()  # until the one whom we guard for closes it, or ends
    _remove(ident)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["guard", ident]:
            _stand_guard(ident)
        case ["cleanup"]:
            print("removed:", " ".join(cleanup()) or "nothing")
        case _:
            sys.exit(__doc__)
