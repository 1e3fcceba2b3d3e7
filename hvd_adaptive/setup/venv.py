"""The ``.venv`` of a checkout: made from nothing, trusted only once its stamp is written last."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from . import allreduce
from .command import clean_environment, run
from .horovod import BUILD_SPACE, EDITS, VERSION, Target, WheelStore, cache_folder, wheel_for
from .machine import (
    GIGABYTE,
    SetupError,
    check_compiler,
    check_headers,
    check_python,
    check_space,
    check_venv_module,
)

TORCH = "2.13.0"
TENSORFLOW = "2.21.0"
# The public index of PyTorch's CPU builds, asked only where pip's own indexes have none.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

CPU_SPACE = 5 * GIGABYTE
CUDA_SPACE = 15 * GIGABYTE
STAMP = "hvd-adaptive.json"


class Reporter(Protocol):
    """Tells the user what happens."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]: ...
    def say(self, sentence: str) -> None: ...
    def progress(self, percent: int) -> None: ...


@dataclass(frozen=True)
class Stamp:
    """The file in ``.venv`` that tells whether it is ours, and whether it is finished."""

    venv: Path

    def read(self) -> str | None:
        """The key of a finished environment, "" for one of ours that is not finished, None for another's."""
        try:
            return str(json.loads((self.venv / STAMP).read_text())["ready"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, key: str = "") -> None:
        """Mark as ours and, with a key, as finished."""
        unfinished = self.venv / f"{STAMP}.new"
        unfinished.write_text(json.dumps({"ready": key}))
        unfinished.replace(self.venv / STAMP)


def environment_key(root: Path) -> str:
    """Changes with anything that would make another environment: pins, project, edits, Python, place."""
    digest = hashlib.sha256()
    for part in (
        *((root / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")),
        *(text.encode() for text in (TORCH, TENSORFLOW, VERSION, repr(EDITS))),
        *(text.encode() for text in (sys.version, platform.machine(), str(root))),
    ):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def prepare(root: Path, reporter: Reporter) -> Path:
    """Make ``root/.venv``, or find it ready, and return its Python.

    Raises:
        SetupError: something is missing; the message says what to do.  What was made so far is not
            trusted by the next run, which begins anew.
    """
    check_python(sys.version_info[:3])
    with _lock(root / ".venv.lock", reporter):
        venv = root / ".venv"
        key = environment_key(root)
        if not is_ready(venv, key):
            _make(root, venv, reporter)
            Stamp(venv).write(key)
        return venv / "bin" / "python"


def is_ready(venv: Path, key: str) -> bool:
    """Whether ``venv`` was finished with this key and its Python still runs."""
    if Stamp(venv).read() != key:
        return False
    try:
        words = [str(venv / "bin" / "python"), "-c", "import numpy, hvd_adaptive"]
        return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
    except OSError:  # the Python that it was made with is gone
        return False


def remove(venv: Path) -> None:
    """Remove an environment that this set-up made; refuse any other."""
    if not venv.exists() and not venv.is_symlink():
        return
    if venv.is_symlink() or Stamp(venv).read() is None:
        raise SetupError(f"{venv} was not made by this set-up: move it away and run the same command again.")
    shutil.rmtree(venv)


def _make(root: Path, venv: Path, reporter: Reporter) -> None:
    cache = cache_folder()
    log = cache / "logs" / f"setup-{time.strftime('%Y%m%d-%H%M%S')}.log"
    store = WheelStore(cache / "wheels")
    remove(venv)
    check_venv_module(sys.version_info[:3])
    if not _wheel_expected(store):  # before minutes of downloads, not after
        check_compiler()
        check_headers()
        check_space(store.folder, BUILD_SPACE, "building Horovod")
    check_space(root, CPU_SPACE, "the virtual environment")

    python = venv / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip"]
    install: list[str | Path] = [*pip, "install", "--constraint", root / "constraints.txt"]
    reporter.say(f"The whole output is in {log}")
    venv.mkdir()
    Stamp(venv).write()
    temporary = venv / "tmp"
    environment = clean_environment(temporary)
    try:
        with reporter.phase("virtual environment"):
            run([sys.executable, "-m", "venv", venv], "Making .venv", log, environment)
            run([*install, "setuptools>=77", "wheel"], "Installing setuptools", log, environment)
        with reporter.phase(f"torch {TORCH}"):
            _install_torch(venv, install, log, environment, reporter)
        with reporter.phase(f"TensorFlow {TENSORFLOW}"):
            # elsewhere the distribution named tensorflow is itself a CPU build
            name = "tensorflow-cpu" if platform.machine() == "x86_64" else "tensorflow"
            run([*install, f"{name}=={TENSORFLOW}"], "Installing TensorFlow", log, environment)
            # tf-keras depends on the distribution named tensorflow, the same files once more
            words = [*install, "--no-deps", f"tf-keras=={TENSORFLOW}"]
            run(words, "Installing tf-keras", log, environment)
        with reporter.phase("this package, editable, and its tools"):
            words = [*install, "--no-build-isolation", "--editable", f"{root}[torch,dev]"]
            run(words, "Installing this package", log, environment)
        with reporter.phase(f"Horovod {VERSION}"):
            target = Target.inspect(python)
            if store.find(target.key) is None:
                reporter.say("Horovod is compiled once for these versions; this takes minutes.")
            wheel = wheel_for(target, store, log, reporter.progress)
            run([*install, wheel], "Installing Horovod", log, environment)
        with reporter.phase("check: two processes under horovodrun"):
            try:
                allreduce.check(python, target.frameworks, environment)
            except SetupError as error:
                raise SetupError(
                    f"{error} If it fails again, remove {wheel.parent}: Horovod is then compiled anew."
                ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _wheel_expected(store: WheelStore) -> bool:
    """Whether a wheel for the frameworks that are about to be installed is stored."""
    here = Target.inspect(sys.executable)
    return any(
        store.find(Target(here.python, here.tag, here.platform, torch, TENSORFLOW).key) is not None
        for torch in (TORCH, f"{TORCH}+cpu")
    )


def _install_torch(
    venv: Path,
    install: list[str | Path],
    log: Path,
    environment: Mapping[str, str],
    reporter: Reporter,
) -> None:
    """The CPU build wherever pip can find it; else what pip brings, and a word about it."""
    attempts: list[list[str]] = [[f"torch=={TORCH}+cpu"]]
    if _answers(CPU_INDEX):
        attempts.append(["--index-url", CPU_INDEX, f"torch=={TORCH}+cpu"])
    for attempt in attempts if sys.platform == "linux" else []:
        try:
            # its dependencies come with this package, from pip's own indexes
            run([*install, "--no-deps", *attempt], "Installing the CPU build of torch", log, environment)
            return
        except SetupError as error:
            if "disk is full" in str(error):
                raise
    if platform.machine() == "x86_64" and sys.platform == "linux":
        reporter.say(
            f"No CPU build of torch {TORCH} was found, neither in pip's indexes nor at {CPU_INDEX}. "
            "Installing the CUDA build instead, several GB; Horovod's build then wants a CUDA toolkit. "
            "To have the CPU build, put its wheel in a folder, name that in PIP_FIND_LINKS, "
            "run make clean and then the same command again."
        )
        check_space(venv, CUDA_SPACE, "the CUDA build of torch")
    run([*install, f"torch=={TORCH}"], "Installing torch", log, environment)


def _answers(url: str) -> bool:
    """Whether the index can be reached; quickly, since on many machines it cannot."""
    try:
        urllib.request.urlopen(f"{url}/torch/", timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        # a certificate that this Python does not know is no obstacle to pip, which brings its own
        return "CERTIFICATE" in str(error.reason).upper()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _lock(path: Path, reporter: Reporter) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            reporter.say("Another set-up of this checkout is running; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
