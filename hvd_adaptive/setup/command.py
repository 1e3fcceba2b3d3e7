"""Run a program into a log file, and say in one sentence why it failed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .machine import SetupError

# What pip, a compiler or the system prints, and what the user can do about it; the first that matches.
_SENTENCES = (
    (
        r"No space left on device|Errno 28\b|Disk quota exceeded",
        "the disk is full. Free some space and run the same command again.",
    ),
    (
        r"externally-managed-environment",
        "this Python belongs to the operating system. Make a virtual environment (python3 -m venv .venv), "
        "activate it, and install there.",
    ),
    (r"No module named pip\b", "this environment has no pip. Add it with: python -m ensurepip"),
    (
        r"Python\.h: No such file",
        "Python's headers are missing. Install them (Debian, Ubuntu: sudo apt-get install python3-dev).",
    ),
    (
        r"Killed signal terminated program|virtual memory exhausted|Cannot allocate memory",
        "the compiler ran out of memory. Close other programs, or set HVD_ADAPTIVE_BUILD_JOBS=1, "
        "and run the same command again.",
    ),
    (
        r"NewConnectionError|Failed to establish a new connection|Temporary failure in name resolution"
        r"|Name or service not known|Network is unreachable|ConnectTimeoutError|ReadTimeoutError"
        r"|Read timed out|ProxyError|ConnectionResetError|ProtocolError|Could not fetch URL",
        "the package index could not be reached. Check the network (and pip's proxy and index settings) "
        "and run the same command again.",
    ),
    (
        r"THESE PACKAGES DO NOT MATCH THE HASHES",
        "a downloaded file is not the one that was released. Clear pip's cache (pip cache purge) "
        "and run the same command again.",
    ),
)
_NO_MATCH = re.compile(r"No matching distribution found for (\S+)")
_NOISE = re.compile(r"^\s*(\[notice\]|WARNING|note:|hint:|$)")


def diagnose(output: str) -> str:
    """One sentence for the ``output`` of a program that failed."""
    for pattern, sentence in _SENTENCES:
        if re.search(pattern, output):
            return sentence
    no_match = _NO_MATCH.search(output)
    if no_match:
        return (
            f"pip finds no {no_match[1]} for this Python and machine. Use a 64-bit Linux with "
            "Python 3.10 to 3.13 (3.11 is the tried one), or check pip's index settings."
        )
    return f"it said: {_telling_line(output)}"


# a compiler's first error is the cause; of a Python program or of pip, the last line is
_TELLING = ((r"\berror: .*\S", 0), (r"^(\[\d+\]<stderr>:)?[\w.]+(Error|Exception)\b", -1), (r"ERROR", -1))


def _telling_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if not _NOISE.match(line)]
    for pattern, place in _TELLING:
        found = [line for line in lines if re.search(pattern, line)]
        if found:
            return found[place]
    return lines[-1] if lines else "nothing."


def run(
    words: Sequence[str | Path],
    what: str,
    log: Path,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Callable[[str], None] | None = None,
) -> str:
    """Run ``words``, append all that it prints to ``log``, and return it.

    Args:
        what: what this does, to begin the error's sentence: "Building Horovod".
        on_line: called with each line as it is printed.

    Raises:
        SetupError: the program is missing or fails; the message names the log.
    """
    command = [str(word) for word in words]
    lines: list[str] = []
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("a", errors="replace") as file:
            file.write(f"$ {' '.join(command)}\n")
            with subprocess.Popen(
                command,
                env=None if environment is None else dict(environment),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    file.write(line)
                    lines.append(line)
                    if on_line is not None:
                        on_line(line)
    except OSError as error:
        raise SetupError(f"{what} failed: {diagnose(str(error))}") from error
    output = "".join(lines)
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        raise SetupError(
            f"{what} was ended by {name}: run the same command again. The whole output is in {log}"
        )
    if process.returncode != 0:
        raise SetupError(f"{what} failed: {diagnose(output)} The whole output is in {log}")
    return output


# Settings of the calling shell, of make and of pip that would leak into what we build.
_LEAKING = (
    *("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "__PYVENV_LAUNCHER__"),
    *("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"),
    *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIRE_VIRTUALENV", "PIP_NO_BINARY", "PIP_DRY_RUN"),
)


def clean_environment(temporary: Path) -> dict[str, str]:
    """The calling environment less what would leak, with ``temporary`` as the temporary folder."""
    temporary.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in _LEAKING}
    environment.update(
        TMPDIR=str(temporary),  # /tmp is often small, or in memory
        PIP_USER="0",
        PIP_NO_INPUT="1",
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        PIP_ROOT_USER_ACTION="ignore",
        PYTHONUNBUFFERED="1",
    )
    return environment
