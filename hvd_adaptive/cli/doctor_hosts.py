"""``hvd-adaptive doctor --hosts a,b,c``: whether several hosts can train together, asked of them over ssh."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shlex
import socket
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

from ..core.errors import ConfigurationError
from .doctor import Finding

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", "ConnectTimeout=10")
"""As Horovod calls it, except that it must not ask."""
_START_SECONDS = 30.0
_ANSWER_SECONDS = 30.0
_CLOCK_BOUND = 0.5
"""Seconds; beyond it, files and logs of several hosts no longer sort by time."""
_SLOW = 0.5
"""A link slower than this share of the median one holds all others up."""
_TITLES = {
    "horovod": "Horovod",
    "torch": "torch",
    "tensorflow": "TensorFlow",
    "tf-keras": "tf-keras",
    "numpy": "NumPy",
    "hvd-adaptive": "hvd-adaptive",
}
_INSTALL = {
    "horovod": "hvd-adaptive horovod install",
    "torch": "pip install torch=={version}",
    "tensorflow": "pip install tensorflow=={version}",
    "tf-keras": "pip install --no-deps tf-keras=={version}",
    "numpy": "pip install numpy=={version}",
    "hvd-adaptive": "pip install hvd-adaptive=={version}, or the same checkout",
}


class AgentError(Exception):
    """A host that does not answer; ``remedy`` says what to do."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


@dataclass(frozen=True)
class Link:
    """What was measured from one host to another."""

    source: str
    target: str
    round_trip: float | None
    """Seconds; None: no connection."""
    bandwidth: float | None = None
    """Bits per second; None where it was not measured."""
    whole_packets: bool | None = None
    """Whether packets of the interface's MTU arrive."""
    error: str = ""


@dataclass
class Survey:
    """All that was found out, before it is judged.

    ``faults`` are the hosts that could not be asked; ``reports`` are those of the others.  ``clocks`` are
    seconds ahead of this host's clock and the uncertainty of that.
    """

    hosts: list[str]
    faults: dict[str, AgentError] = field(default_factory=dict)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)


def parse_hosts(text: str) -> list[str]:
    """The names in ``a,b,c``, or in ``a:2,b:2`` as horovodrun has them."""
    names = [word.strip().partition(":")[0] for word in text.split(",")]
    if not all(names):
        raise ConfigurationError(f"--hosts={text!r} has an empty name: write them as a,b,c.")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigurationError(
            f"--hosts={text!r} has {', '.join(sorted(twice))} twice: name each host once."
        )
    return names


class Agent:
    """The agent on one host, over ssh, or as a plain process where the host is this one."""

    def __init__(self, host: str, ssh_options: Sequence[str]) -> None:
        self.host = host
        source = zlib.compress((Path(__file__).parent / "host_agent.py").read_bytes(), 9)
        text = base64.b64encode(source).decode()
        loader = f"import base64,zlib;exec(zlib.decompress(base64.b64decode('{text}')))"
        # as horovodrun does: the same Python by its path, and this environment's PYTHONPATH
        words = [sys.executable, "-c", loader]
        if os.environ.get("PYTHONPATH"):
            words = ["env", f"PYTHONPATH={os.environ['PYTHONPATH']}", *words]
        if not _is_here(host):
            words = [*_SSH, *ssh_options, host, shlex.join(words)]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            errors="replace",
        )

    def ask(self, ask: str, seconds: float = _ANSWER_SECONDS, **details: Any) -> dict[str, Any]:
        """One request, one answer.

        Raises:
            AgentError: there is no answer in time, or the connection is gone.
        """
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            process.stdin.write(json.dumps({"ask": ask, **details}) + "\n")
            process.stdin.flush()
        if not select.select([process.stdout], [], [], seconds)[0]:
            process.kill()
            raise AgentError(f"no answer within {seconds:g} s", f"check the load of {self.host}")
        line = process.stdout.readline()
        if not line:
            process.wait()
            raise self._failure(process.stderr.read(), process.returncode)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=0.1)  # the end of its stdin ends it
        self._process.kill()
        self._process.wait()

    def _failure(self, said: str, status: int) -> AgentError:
        host = self.host
        last = next(iter(reversed(said.strip().splitlines())), f"it ended with status {status}")
        for sign, remedy in (
            ("Permission denied", f"ssh-copy-id {host}, so that you can log in without a password"),
            ("Host key verification failed", f"ssh-keygen -R {host}, if the host was made anew"),
            ("Could not resolve hostname", f"give {host} an address in /etc/hosts or DNS"),
            ("Connection refused", f"start sshd on {host} (or give its port with --ssh-port)"),
            ("timed out", f"check that {host} is up and that no firewall drops ssh"),
            ("No route to host", f"check that {host} is up and on this network"),
            ("Network is unreachable", f"check that {host} is up and on this network"),
        ):
            if sign in said:
                return AgentError(f"ssh {host}: {last}", remedy)
        if status == 127 or "No such file or directory" in last or "not found" in last:
            return AgentError(
                f"{host} has no {sys.executable}", f"on {host}, install the same environment at the same path"
            )
        return AgentError(f"{host}: {last}", f"run this again; if it fails again, try: ssh {host} true")


def _is_here(host: str) -> bool:
    """Whether ``host`` is this one: only here can its address be bound to."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((socket.gethostbyname(host), 0))
            return True
    except OSError:
        return False


def survey(hosts: Sequence[str], ssh_options: Sequence[str] = (), seconds: float = 1.0) -> Survey:
    """Ask every host, and measure between them.

    Args:
        hosts: their names, as horovodrun will be given them.
        ssh_options: for the ssh client: a port, an identity file.
        seconds: of each measurement of bandwidth.
    """
    found = Survey(list(hosts))
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(max_workers=32) as pool:
        agents = {host: Agent(host, ssh_options) for host in hosts}
        for agent in agents.values():
            stack.callback(agent.close)

        def meet(host: str) -> AgentError | None:
            try:
                found.clocks[host] = _clock(agents[host])
            except AgentError as error:
                return error
            return None

        found.faults = {
            host: error for host, error in zip(hosts, pool.map(meet, hosts), strict=True) if error is not None
        }
        alive = [host for host in hosts if host not in found.faults]
        for host in alive:
            try:
                found.addresses[host] = socket.gethostbyname(host)
            except OSError:  # a name that only the ssh client's settings know
                found.faults[host] = AgentError(
                    f"ssh reaches {host}, but this name has no address",
                    f"give {host} an address in /etc/hosts or DNS: Horovod looks it up there",
                )
        alive = [host for host in alive if host in found.addresses]
        try:
            for host in alive:
                peers = [found.addresses[peer] for peer in alive if peer != host]
                found.reports[host] = agents[host].ask("report", peers=peers, folder=os.getcwd())
            found.links = _measure(agents, found, alive, seconds)
        except AgentError as error:  # it answered before, and is gone now
            found.faults["during the survey"] = error
    return found


def _clock(agent: Agent) -> tuple[float, float]:
    """Seconds by which the host's clock is ahead, and how far off that may be: half of a round trip."""
    agent.ask("time", seconds=_START_SECONDS)  # its start-up is not part of a round trip
    trips = []
    for _ in range(5):
        began, before = time.monotonic(), time.time()
        there = agent.ask("time")["time"]
        took = time.monotonic() - began
        trips.append((took / 2, there - (before + took / 2)))
    uncertainty, ahead = min(trips)
    return ahead, uncertainty


def _measure(agents: dict[str, Agent], found: Survey, alive: list[str], seconds: float) -> list[Link]:
    """Round trips between all, as Gloo connects all with all; bandwidth along the ring, as its rings send."""
    if len(alive) < 2:
        return []
    ports = {host: agents[host].ask("listen")["port"] for host in alive}
    ring = set(zip(alive, [*alive[1:], alive[0]], strict=True))
    links = []
    for source, target in permutations(alive, 2):
        place = {"address": found.addresses[target], "port": ports[target]}
        answer = agents[source].ask("ping", **place)
        if "error" in answer:
            links.append(Link(source, target, None, error=answer["error"]))
            continue
        size = _mtu(found.reports[source], found.addresses[target])
        whole = agents[source].ask("datagram", **place, size=size)["passed"] if size else None
        bandwidth, error = None, ""
        if (source, target) in ring:
            told = agents[source].ask("stream", _ANSWER_SECONDS + seconds, **place, duration=seconds)
            bandwidth, error = told.get("bits_per_second"), told.get("error", "")
        links.append(Link(source, target, answer["seconds"], bandwidth, whole, error))
    return links


def _interface(report: dict[str, Any], peer_address: str) -> str | None:
    """The interface over which a host sends to a peer."""
    source = report["routes"].get(peer_address)
    for name, details in report["interfaces"].items():
        if details["address"] == source:
            return str(name)
    return None


def _mtu(report: dict[str, Any], peer_address: str) -> int | None:
    name = _interface(report, peer_address)
    return None if name is None else int(report["interfaces"][name]["mtu"])


def judge(found: Survey) -> list[Finding]:
    """The table's rows, from what was found out."""
    rows = [_ssh(found)]
    if found.reports:
        rows += [_same("Python", {host: report["python"] for host, report in found.reports.items()})]
        rows += _packages(found)
        rows += _builds(found)
        rows += [_clocks(found), *_hostnames(found), _folder(found), *_networks(found)]
    rows += _links(found)
    return rows


def _ssh(found: Survey) -> Finding:
    if not found.faults:
        return Finding("ssh", "ok", f"{len(found.hosts)} hosts answer")
    faults = found.faults.values()
    return Finding("ssh", "missing", _lines(map(str, faults)), _lines(error.remedy for error in faults))


def _lines(texts: Any) -> str:
    return "\n".join(dict.fromkeys(texts))


def _by_value(values: dict[str, Any]) -> dict[Any, list[str]]:
    """The hosts that have each value; the value of most hosts first."""
    groups: dict[Any, list[str]] = {}
    for host, value in values.items():
        groups.setdefault(value, []).append(host)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _same(title: str, values: dict[str, str | None], remedy: str = "install {version}") -> Finding:
    """One value on all hosts is well; else all are told, and who is to change."""
    groups = _by_value(values)
    if len(groups) == 1:
        return Finding(title, "ok", str(next(iter(groups))))
    told = _lines(f"{value or 'not installed'}: {', '.join(hosts)}" for value, hosts in groups.items())
    wanted = next(value for value in groups if value is not None)
    others = [host for value, hosts in groups.items() if value != wanted for host in hosts]
    return Finding(title, "missing", told, f"on {', '.join(others)}: {remedy.format(version=wanted)}")


def _packages(found: Survey) -> Iterator[Finding]:
    for package, title in _TITLES.items():
        values = {host: report["versions"].get(package) for host, report in found.reports.items()}
        if any(values.values()):
            yield _same(title, values, _INSTALL[package])
        elif package in ("horovod", "hvd-adaptive"):
            yield Finding(title, "missing", "not installed on any host", f"on each: {_INSTALL[package]}")


def _builds(found: Survey) -> Iterator[Finding]:
    """A Horovod that was built with another framework version than its host has does not load."""
    for host, report in found.reports.items():
        for name, built in report["built"].items():
            installed = report["versions"].get(name)
            if None not in (built, installed) and built != installed:
                yield Finding(
                    f"horovod.{name}",
                    "missing",
                    f"{host}: built with {name} {built}, {installed} is installed",
                    f"on {host}: {_INSTALL['horovod']} --yes",
                )


def _clocks(found: Survey) -> Finding:
    ahead = {host: found.clocks[host] for host in found.reports}
    latest = max(ahead, key=lambda host: ahead[host][0])
    earliest = min(ahead, key=lambda host: ahead[host][0])
    apart = ahead[latest][0] - ahead[earliest][0]
    unsure = ahead[latest][1] + ahead[earliest][1]
    said = f"{apart:.3f} s apart at most, to within {unsure:.3f} s"
    if apart - unsure <= _CLOCK_BOUND:
        return Finding("clocks", "ok", said)
    said = f"{latest} is ahead of {earliest} by {apart:.1f} s"
    return Finding("clocks", "note", said, "on each host: timedatectl set-ntp true (or install chrony)")


def _hostnames(found: Survey) -> Iterator[Finding]:
    """Horovod's Gloo binds to what the hostname resolves to, whatever interface is chosen."""
    wrong = []
    for host, report in found.reports.items():
        name, address = report["hostname"], report["resolved"]
        own = [details["address"] for details in report["interfaces"].values()]
        if address is None:
            said = f"{host}: its hostname {name} does not resolve"
        elif address.startswith("127."):
            said = f"{host}: its hostname {name} resolves to {address}, so others' connections are refused"
        elif address not in own:
            said = f"{host}: its hostname {name} resolves to {address}, which is none of its own addresses"
        else:
            continue
        wrong.append((said, f"on {host}, in /etc/hosts: {found.addresses[host]} {name}"))
    state = "missing" if len(found.reports) > 1 else "note"
    if wrong:
        yield Finding("hostnames", state, *(_lines(column) for column in zip(*wrong, strict=True)))
    else:
        yield Finding("hostnames", "ok", "each resolves to an own address")


def _folder(found: Survey) -> Finding:
    lacking = [host for host, report in found.reports.items() if not report["folder"]]
    here = os.getcwd()
    if not lacking:
        return Finding("folder", "ok", here)
    remedy = f"make it there, or run horovodrun from a folder that all have: {', '.join(lacking)}"
    return Finding("folder", "note", f"{here} is not on {', '.join(lacking)}", remedy)


def _networks(found: Survey) -> Iterator[Finding]:
    """The interface that leads to the others, by name and MTU."""
    if len(found.reports) < 2:
        return
    used: dict[str, str | None] = {}
    mtus: dict[str, str | None] = {}
    for host, report in found.reports.items():
        peers = [found.addresses[peer] for peer in found.reports if peer != host]
        names = {_interface(report, peer) for peer in peers} - {None}
        used[host] = " and ".join(sorted(str(name) for name in names)) or None
        sizes = {report["interfaces"][name]["mtu"] for name in names}
        mtus[host] = " and ".join(str(size) for size in sorted(sizes)) or None
    groups = _by_value(used)
    told = _lines(f"{name or 'no route'}: {', '.join(hosts)}" for name, hosts in groups.items())
    if None in groups:
        remedy = f"check the routes of {', '.join(groups[None])}: ip route get ADDRESS"
        yield Finding("interface", "missing", told, remedy)
    elif len(groups) > 1:
        remedy = "rename it (ip link set OLD name NEW): Horovod takes one interface name for all hosts"
        yield Finding("interface", "missing", told, remedy)
    else:
        yield Finding(
            "interface", "ok", f"{next(iter(groups))}; horovodrun --network-interfaces {next(iter(groups))}"
        )
    if None not in mtus.values():
        yield _same("MTU", mtus, "ip link set INTERFACE mtu {version}")


def _links(found: Survey) -> Iterator[Finding]:
    if not found.links:
        return
    cut = [link for link in found.links if link.round_trip is None]
    if cut:
        told = _lines(f"{link.source} cannot connect to {link.target}: {link.error}" for link in cut)
        remedy = "let TCP between the hosts pass, on all ports: Horovod's are chosen anew in each run"
        yield Finding("connections", "missing", told, remedy)
    trips = [link for link in found.links if link.round_trip is not None]
    if trips:
        times = {link: 1e3 * (link.round_trip or 0) for link in trips}
        slow = max(trips, key=lambda link: times[link])
        said = f"{min(times.values()):.2f} to {times[slow]:.2f} ms a round trip, {_arrow(slow)} the slowest"
        yield Finding("latency", "ok", said)
    short = [link for link in trips if link.whole_packets is False]
    if short:
        told = _lines(f"{_arrow(link)}: packets of the interface's MTU are lost" for link in short)
        remedy = "set the smallest MTU of the path on every host: ip link set INTERFACE mtu N"
        yield Finding("packets", "missing", told, remedy)
    broken = [link for link in trips if link.error]
    if broken:
        told = _lines(f"{_arrow(link)}: {link.error}" for link in broken)
        yield Finding("bandwidth", "missing", told, "check MTU and firewall between these hosts")
    yield from _bandwidths({_arrow(link): link.bandwidth for link in trips if link.bandwidth})


def _bandwidths(rates: dict[str, float]) -> Iterator[Finding]:
    if not rates:
        return
    worst = min(rates, key=lambda name: rates[name])
    said = f"{_rate(rates[worst])} ({worst}) to {_rate(max(rates.values()))}"
    advice = f"tell adaptive: cost=LinkTime(PayloadBits(1), bandwidth={rates[worst]:.2g})"
    median = statistics.median(rates.values())
    if len(rates) > 2 and rates[worst] < _SLOW * median:
        remedy = f"check that link's cable, duplex and neighbours: the others have {_rate(median)}; {advice}"
        yield Finding("bandwidth", "note", said, remedy)
    else:
        yield Finding("bandwidth", "ok", said, advice)


def _arrow(link: Link) -> str:
    return f"{link.source} to {link.target}"


def _rate(bits_per_second: float) -> str:
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits_per_second >= size:
            return f"{bits_per_second / size:.3g} {unit}"
    return f"{bits_per_second / 1e3:.3g} kbit/s"
