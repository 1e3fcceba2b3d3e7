"""``hvd-adaptive doctor``: what is installed, what is missing, and the command that mends it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..setup.horovod import VERSION, Target
from ..setup.machine import OLDEST_PYTHON, SetupError, check_compiler, check_headers, compiler_command

_IMPORT_SECONDS = 180  # TensorFlow on a busy machine


@dataclass(frozen=True)
class Finding:
    """One row: ``state`` is "ok", "missing" (needed, so the exit status is 1) or "note"."""

    name: str
    state: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class InstalledHorovod:
    """A Horovod and the framework versions it was built with (None: built without)."""

    version: str
    torch: str | None
    tensorflow: str | None

    @property
    def description(self) -> str:
        built = [f"{name} {getattr(self, name)}" for name in ("torch", "tensorflow") if getattr(self, name)]
        return f"built with {' and '.join(built)}" if built else "built without torch and TensorFlow"

    def fits(self, target: Target) -> bool:
        """Whether it was built with exactly the frameworks that are installed."""
        return all(getattr(target, name) in (None, getattr(self, name)) for name in ("torch", "tensorflow"))


def installed_horovod() -> InstalledHorovod | None:
    """Read, without importing it, what the installed Horovod says of itself."""
    try:
        distribution = importlib.metadata.distribution("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None
    try:
        built = json.loads(Path(str(distribution.locate_file("horovod/metadata.json"))).read_text())
    except (OSError, ValueError):
        built = {}
    return InstalledHorovod(distribution.version, built.get("pytorch"), built.get("tensorflow"))


def examine() -> list[Finding]:
    """Every finding, in the table's order."""
    target = Target.inspect(sys.executable, os.environ.get("PYTHONPATH", ""))
    return [
        _python(),
        _compiler(target),
        _cmake(),
        _distribution("NumPy", "numpy", needed=True, remedy="pip install 'numpy>=2'"),
        *_frameworks(target),
        *_horovod(target, installed_horovod()),
        hostname(),
    ]


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Finding("Python", "missing", version, "install Python 3.10 or newer")
    return Finding("Python", "ok", f"{version} at {sys.executable}")


def _compiler(target: Target) -> Finding:
    """Needed only to compile Horovod, so its lack is a note unless Horovod is missing too."""
    state = "missing" if installed_horovod() is None else "note"
    try:
        check_compiler()
        check_headers(target.include)
    except SetupError as error:
        return Finding(
            "C++17 compiler", state, str(error), "sudo apt-get install build-essential python3-dev"
        )
    words = compiler_command() or []
    answer = subprocess.run([*words, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return Finding("C++17 compiler", "ok", next(iter(answer.stdout.splitlines()), words[0]))


def _cmake() -> Finding:
    own = shutil.which("cmake")
    return Finding("CMake", "ok", f"brought by pip for the build{f' ({own} is not used)' if own else ''}")


def _distribution(title: str, name: str, needed: bool, remedy: str) -> Finding:
    try:
        return Finding(title, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(title, "missing" if needed else "note", "not installed", remedy)


def _frameworks(target: Target) -> list[Finding]:
    """One of the two is needed; tf-keras only beside TensorFlow."""
    state = "note" if target.frameworks else "missing"
    findings = []
    for title, name in (("torch", "torch"), ("TensorFlow", "tensorflow")):
        version = getattr(target, name)
        findings.append(
            Finding(title, "ok", version)
            if version is not None
            else Finding(title, state, "not installed", f"pip install 'hvd-adaptive[{name}]'")
        )
    if target.tensorflow is not None:
        remedy = "pip install --no-deps tf-keras=={}.*".format(".".join(target.tensorflow.split(".")[:2]))
        findings.append(_distribution("tf-keras", "tf-keras", needed=False, remedy=remedy))
    return findings


def _horovod(target: Target, found: InstalledHorovod | None) -> list[Finding]:
    remedy = "hvd-adaptive horovod install"
    if found is None:
        return [Finding("Horovod", "missing", "not installed", remedy)]
    if found.version != VERSION:
        return [Finding("Horovod", "missing", f"{found.version}; {VERSION} is the supported one", remedy)]
    findings = [Finding("Horovod", "ok", f"{found.version}, {found.description}")]
    for name in target.frameworks:
        findings.append(_binding(name, getattr(target, name), getattr(found, name), f"{remedy} --yes"))
    launcher = shutil.which("horovodrun") or shutil.which("horovodrun", path=str(Path(sys.executable).parent))
    findings.append(
        Finding("horovodrun", "ok", launcher)
        if launcher
        else Finding("horovodrun", "missing", "not on the path", f"{remedy} --force --yes")
    )
    return findings


def _binding(name: str, installed: str, built: str | None, remedy: str) -> Finding:
    """Horovod for one framework: built with the version that is installed, and imports."""
    title = f"horovod.{name}"
    if built is None:
        return Finding(title, "missing", f"Horovod was built without {name}", remedy)
    if built != installed:
        return Finding(title, "missing", f"built with {name} {built}, {installed} is installed", remedy)
    try:
        answer = subprocess.run(
            [sys.executable, "-c", f"import {title} as hvd; hvd.init(); print(hvd.gloo_built())"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_IMPORT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Finding(title, "missing", f"importing it took more than {_IMPORT_SECONDS} s", remedy)
    if answer.returncode != 0:
        last = next(iter(reversed(answer.stderr.strip().splitlines())), "it said nothing")
        return Finding(title, "missing", f"does not import: {last}", f"{remedy} --force")
    if answer.stdout.split()[-1] != "True":
        return Finding(title, "note", "works; built without Gloo, so it needs MPI", f"{remedy} --force")
    return Finding(title, "ok", "imports; built with Gloo")


def hostname(
    resolve: Callable[[str], str] = socket.gethostbyname, own_name: Callable[[], str] = socket.gethostname
) -> Finding:
    """Over several hosts, Horovod's Gloo binds to what the hostname resolves to: not to be loopback."""
    name = own_name()
    remedy = f"for several hosts: in /etc/hosts, give {name} this host's network address"
    try:
        address = resolve(name)
    except OSError:
        return Finding("hostname", "note", f"{name} does not resolve", remedy)
    if address.startswith("127."):
        found = f"{name} resolves to {address}: fine on one host, connections are refused over several"
        return Finding("hostname", "note", found, remedy)
    return Finding("hostname", "ok", f"{name} resolves to {address}")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--hosts", metavar="A,B,..", help="Ask these hosts over ssh instead, and measure between them.")
@click.option("--ssh-port", type=click.IntRange(1, 65535), help="With --hosts: sshd's port on each.")
@click.option("--ssh-identity-file", metavar="FILE", help="With --hosts: the private key to log in with.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1, max=60),
    default=1.0,
    show_default=True,
    help="With --hosts: of each measurement of bandwidth.",
)
def doctor(
    as_json: bool, hosts: str | None, ssh_port: int | None, ssh_identity_file: str | None, seconds: float
) -> None:
    """Say what is installed, what Horovod was built with, what is missing, and what mends it.

    With --hosts, from the host on which horovodrun will be started: whether ssh reaches all, whether they
    have the same software, clocks, hostnames, interfaces, MTU, and how fast the links between them are.

    The exit status is 1 if something that is needed is missing.
    """
    details: dict[str, object] = {}
    with Console(stderr=True).status("Looking"):
        if hosts is None:
            findings = examine()
        else:
            from . import doctor_hosts

            options = ["-p", str(ssh_port)] if ssh_port else []
            options += ["-i", ssh_identity_file] if ssh_identity_file else []
            found = doctor_hosts.survey(doctor_hosts.parse_hosts(hosts), options, seconds)
            findings = doctor_hosts.judge(found)
            details = {"hosts": found.reports, "links": [asdict(link) for link in found.links]}
    healthy = all(finding.state != "missing" for finding in findings)
    if as_json:
        report = {"healthy": healthy, "findings": [asdict(finding) for finding in findings], **details}
        click.echo(json.dumps(report, indent=2))
    else:
        _print(findings)
    sys.exit(0 if healthy else 1)


def _print(findings: list[Finding]) -> None:
    colours = {"ok": "green", "note": "yellow", "missing": "red"}
    table = Table()
    for heading in ("", "", "found", "what mends it"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        state = f"[{colours[finding.state]}]{finding.state}"
        table.add_row(state, *map(escape, (finding.name, finding.found, finding.remedy)))
    Console(highlight=False).print(table)
