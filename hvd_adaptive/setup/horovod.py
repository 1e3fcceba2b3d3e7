"""The builder: a Horovod wheel for the frameworks that a Python has, kept in the user's cache.

The source is the release on the package index, checked against its hash.  Three edits of its build
settings, and none of its code, make it compile against current frameworks.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .command import clean_environment, run
from .machine import GIGABYTE, SetupError, build_jobs, check_compiler, check_headers, check_space

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
BUILD_SPACE = 2 * GIGABYTE

# Newer setuptools and CMake no longer build this release.  The rest is what its setup.py imports or
# would otherwise fetch by itself.
BUILD_TOOLS = (
    *("setuptools>=77,<81", "wheel", "cmake>=3.25,<4"),
    *("packaging", "cffi", "cloudpickle", "psutil", "pyyaml"),
)


@dataclass(frozen=True)
class Edit:
    """One change of a build file: ``old`` must occur exactly once."""

    path: str
    old: str
    new: str


EDITS = (
    # current torch and TensorFlow headers are C++17
    Edit("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    Edit("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    # needs a header that TensorFlow's wheels no longer carry; only XLA-compiled Horovod operations go
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
    ),
)

# Horovod's own build settings, which a user may give (GPU operations, MPI): they change the wheel.
_BUILD_SETTING = re.compile(
    r"HOROVOD_(WITH|WITHOUT|GPU|CPU|CUDA|NCCL|ROCM|MPI|CCL|BUILD|ALLOW_MIXED|NVTX)(_|$)|HOROVOD_DEBUG$"
)

_INSPECT = """
import importlib.metadata, json, sys, sysconfig
def version(*names):
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
print(json.dumps({
    "tag": sys.implementation.cache_tag,
    "platform": sysconfig.get_platform(),
    "include": sysconfig.get_path("include"),
    "torch": version("torch"),
    "tensorflow": version("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly"),
}))
"""


@dataclass(frozen=True)
class Target:
    """The Python that a wheel is for, and the frameworks it has (None: not installed)."""

    python: str
    tag: str
    platform: str
    torch: str | None
    tensorflow: str | None
    include: str | None = None
    path: str = ""

    @classmethod
    def inspect(cls, python: str | Path, path: str = "") -> Target:
        """Ask ``python`` itself; ``path`` is the PYTHONPATH under which it finds its frameworks."""
        answer = subprocess.run(
            [str(python), "-c", _INSPECT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        if answer.returncode != 0:
            raise SetupError(f"{python} does not run: {answer.stderr.strip()[-300:]}")
        return cls(str(python), path=path, **json.loads(answer.stdout))

    @property
    def frameworks(self) -> tuple[str, ...]:
        return tuple(name for name in ("torch", "tensorflow") if getattr(self, name) is not None)

    @property
    def key(self) -> str:
        """Names the wheel: same key, interchangeable wheel."""
        recipe = repr((EDITS, sorted(build_settings().items())))
        parts = [
            f"horovod-{VERSION}",
            self.tag,
            self.platform,
            *(f"{name}-{getattr(self, name)}" for name in self.frameworks),
            hashlib.sha256(recipe.encode()).hexdigest()[:8],
        ]
        return "-".join(parts)


def build_settings() -> dict[str, str]:
    """The Horovod build settings in the calling environment."""
    return {name: value for name, value in os.environ.items() if _BUILD_SETTING.match(name)}


def cache_folder() -> Path:
    """Where wheels and logs are kept: $XDG_CACHE_HOME/hvd-adaptive, or ~/.cache/hvd-adaptive."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG specification says that a relative path is to be ignored
    base = Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache"
    return base / "hvd-adaptive"


@dataclass(frozen=True)
class WheelStore:
    """Finished wheels, one folder per key: the wheel and, written with it, its hash."""

    folder: Path

    def find(self, key: str) -> Path | None:
        """The wheel stored under ``key``, if it is there and whole."""
        try:
            record = json.loads((self.folder / key / "wheel.json").read_text())
            wheel = self.folder / key / record["name"]
            return wheel if _sha256(wheel) == record["sha256"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def add(self, key: str, wheel: Path) -> Path:
        """Keep a copy of ``wheel``; it appears whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
        try:
            shutil.copy2(wheel, staging)
            record = {"name": wheel.name, "sha256": _sha256(staging / wheel.name)}
            (staging / "wheel.json").write_text(json.dumps(record))
            staging.chmod(0o755)
            shutil.rmtree(self.folder / key, ignore_errors=True)
            staging.rename(self.folder / key)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return self.folder / key / wheel.name

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Held while a wheel is built, so that two set-ups at once build it once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f".{key}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def wheel_for(
    target: Target,
    store: WheelStore,
    log: Path,
    on_progress: Callable[[int], None] = lambda percent: None,
    rebuild: bool = False,
) -> Path:
    """A Horovod wheel for ``target``: the stored one, or one built now and stored.

    Args:
        target: what to build for; at least one framework.
        store: where finished wheels are kept.
        log: receives all output of the build.
        on_progress: called with the percentage of the compilation done.
        rebuild: build even where a wheel is stored.

    Raises:
        SetupError: something is missing or the build fails; the message says what to do.
    """
    if not target.frameworks:
        raise SetupError(
            "Neither torch nor TensorFlow is installed for this Python: install one first "
            "(pip install torch, or pip install tensorflow tf-keras); Horovod is built against it."
        )
    with store.lock(target.key):
        stored = None if rebuild else store.find(target.key)
        return stored or _build(target, store, log, on_progress)


def _build(target: Target, store: WheelStore, log: Path, on_progress: Callable[[int], None]) -> Path:
    check_compiler()
    check_headers(target.include)
    work = _working_folder(store.folder, target)
    check_space(work, BUILD_SPACE, "building Horovod")
    with _emptied(work):
        tools = work / "tools"
        environment = clean_environment(work / "tmp")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tools), target.path]))
        pip: list[str | Path] = [target.python, "-m", "pip"]
        # beside the environment, not in it: it keeps its own setuptools and CMake
        install: list[str | Path] = [*pip, "install", "--target", tools, "--upgrade", *BUILD_TOOLS]
        run(install, "Fetching the build tools", log, environment)
        source = patch(unpack(fetch(pip, work, log, environment), work))
        environment.update(_horovod_settings(target, tools))
        run(
            [*pip, "wheel", "-v", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-w", work, source],
            "Building Horovod",
            log,
            environment,
            on_line=lambda line: _report_percentage(line, on_progress),
        )
        wheel = next(work.glob("horovod-*.whl"))
        check_wheel(wheel, target.frameworks)
        return store.add(target.key, wheel)


def _working_folder(base: Path, target: Target) -> Path:
    """Where to compile: in ``base``, or in the temporary folder if the path of ``base`` will not do.

    Horovod's CMake files take the path of their folder for a regular expression: with a "+" in it they
    succeed, and put the libraries where the wheel does not have them.
    """
    name = f".build-{hashlib.sha256(target.key.encode()).hexdigest()[:16]}"
    for folder in (base, Path(tempfile.gettempdir())):
        if re.fullmatch(r"[\w./-]+", str(folder.absolute()), re.ASCII):
            return folder.absolute() / name
    raise SetupError(
        f"Horovod cannot be compiled in {base}, since that path has other characters than letters, digits, "
        '".", "-", "_" and "/": set TMPDIR to a folder without them and run the same command again.'
    )


@contextlib.contextmanager
def _emptied(folder: Path) -> Iterator[None]:
    """An empty folder, gone afterwards; what a killed build left there goes first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_wheel(wheel: Path, frameworks: Sequence[str]) -> None:
    """Refuse a wheel that lacks the library of one of ``frameworks``."""
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    for framework in frameworks:
        if not any(re.match(rf"horovod/{framework}/mpi_lib[^/]*\.so$", name) for name in names):
            raise SetupError(
                f"Horovod's build ended without its library for {framework}: if you gave build settings "
                "(HOROVOD_...), check them; else report it with the log."
            )


def fetch(pip: Sequence[str | Path], work: Path, log: Path, environment: Mapping[str, str]) -> Path:
    """Download the release's source with pip, and check that it is the release."""
    words = [*pip, "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", work]
    run([*words, f"horovod=={VERSION}"], f"Downloading the source of Horovod {VERSION}", log, environment)
    archive = work / f"horovod-{VERSION}.tar.gz"
    check_hash(archive)
    return archive


def check_hash(archive: Path) -> None:
    """Refuse a source archive that is not the one released."""
    if _sha256(archive) != SDIST_SHA256:
        raise SetupError(
            f"The source of Horovod {VERSION} that pip brought is not the one released (its SHA-256 "
            "differs): check pip's index settings, or clear its cache with: pip cache purge"
        )


def unpack(archive: Path, work: Path) -> Path:
    with tarfile.open(archive) as file:
        if hasattr(tarfile, "data_filter"):
            file.extractall(work, filter="data")
        else:
            file.extractall(work)
    return work / f"horovod-{VERSION}"


def patch(source: Path) -> Path:
    """Make the edits in an unpacked source tree.

    Raises:
        SetupError: the tree lacks a line that an edit changes, so it is not the release they are for.
    """
    for edit in EDITS:
        file = source / edit.path
        text = file.read_text() if file.is_file() else ""
        if text.count(edit.old) != 1:
            raise SetupError(
                f"{edit.path} in Horovod's source does not have the line {edit.old.strip()!r} exactly once: "
                f"this is not the source of Horovod {VERSION}, the only release that can be built here."
            )
        file.write_text(text.replace(edit.old, edit.new))
    return source


def _horovod_settings(target: Target, tools: Path) -> dict[str, str]:
    settings = {
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_CMAKE": str(tools / "cmake" / "data" / "bin" / "cmake"),
        "MAKEFLAGS": f"-j{build_jobs()}",
    }
    for name, framework in (("PYTORCH", target.torch), ("TENSORFLOW", target.tensorflow)):
        settings[f"HOROVOD_WITH{'OUT' if framework is None else ''}_{name}"] = "1"
    if "HOROVOD_WITH_MPI" not in os.environ:
        settings["HOROVOD_WITHOUT_MPI"] = "1"
    return settings


def _report_percentage(line: str, on_progress: Callable[[int], None]) -> None:
    step = re.match(r"\s*\[\s*(\d+)%\]", line)
    if step:
        on_progress(int(step[1]))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
