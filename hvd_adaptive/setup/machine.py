"""What the machine must offer; each check raises a :class:`SetupError` that says what to do."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..core.errors import HvdAdaptiveError

OLDEST_PYTHON = (3, 10)
GIGABYTE = 10**9

_CXX17 = "#include <optional>\nint main() { std::optional<int> x; return x.value_or(0); }\n"


class SetupError(HvdAdaptiveError, RuntimeError):
    """Set-up cannot go on; the message is a plain sentence that says what to do."""


def check_python(version: Sequence[int]) -> None:
    if tuple(version[:2]) < OLDEST_PYTHON:
        raise SetupError(
            f"Python {version[0]}.{version[1]} is too old: install Python 3.10 or newer "
            "(Debian, Ubuntu: sudo apt-get install python3 python3-venv python3-dev) and name it with "
            "make PYTHON=/path/to/python3."
        )


def check_venv_module(version: Sequence[int]) -> None:
    """Debian ships Python without ensurepip, which venv needs, unless python3-venv is installed."""
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise SetupError(
            "This Python cannot make virtual environments: install its venv module "
            f"(Debian, Ubuntu: sudo apt-get install python{version[0]}.{version[1]}-venv)."
        )


def compiler_command() -> list[str] | None:
    """The C++ compiler that CMake would choose: $CXX, or the first of c++, g++ and clang++ on the path."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    return None


def check_compiler() -> None:
    """A C++17 compiler and make, tried by compiling a few lines."""
    command = compiler_command()
    if command is None or shutil.which("make") is None:
        missing = "C++ compiler" if command is None else "make program"
        raise SetupError(
            f"No {missing} was found, and Horovod must be compiled: install one "
            "(Debian, Ubuntu: sudo apt-get install build-essential) and run the same command again."
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "check.cc")
        source.write_text(_CXX17)
        words = [*command, "-std=c++17", str(source), "-o", str(source.with_suffix(".out"))]
        if subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True).returncode != 0:
            raise SetupError(
                f"The C++ compiler {command[0]} cannot compile C++17: install g++ 9 or newer "
                "(Debian, Ubuntu: sudo apt-get install build-essential) or name another with CXX=..."
            )


def check_headers(include: str | None = None) -> None:
    """Horovod's torch extension includes Python.h; ``include`` is its folder, this Python's by default."""
    folder = include or sysconfig.get_path("include")
    name = f"{Path(folder).name}-dev" if re.fullmatch(r"python3\.\d+", Path(folder).name) else "python3-dev"
    if not Path(folder, "Python.h").is_file():
        raise SetupError(
            f"Python.h is not in {folder}, and Horovod must be compiled against it: install Python's headers "
            f"(Debian, Ubuntu: sudo apt-get install {name}) and run the same command again."
        )


def free_bytes(path: Path) -> int:
    """Free space, in bytes, where ``path`` is or would be made."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def check_space(path: Path, needed: int, purpose: str) -> None:
    """``needed`` bytes must be free where ``path`` is."""
    free = free_bytes(path)
    if free < needed:
        raise SetupError(
            f"The disk that holds {path} is full: {purpose} needs {needed / GIGABYTE:.1f} GB and "
            f"{free / GIGABYTE:.1f} GB are free. Free some space and run the same command again."
        )


def build_jobs() -> int:
    """Compiler processes to run at once: one per core, and no more than memory holds (2 GB each)."""
    chosen = os.environ.get("HVD_ADAPTIVE_BUILD_JOBS", "")
    if chosen:
        if not chosen.isdigit() or int(chosen) < 1:
            raise SetupError(f"HVD_ADAPTIVE_BUILD_JOBS={chosen} must be a whole number, 1 or more.")
        return int(chosen)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, memory // (2 * GIGABYTE)))
