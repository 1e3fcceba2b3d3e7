"""Build the CPU image, and run containers of it, where there is no Docker engine: with buildah, as root.

    python docker/without_engine.py build                      both frameworks
    python docker/without_engine.py build torch                one
    python docker/without_engine.py sizes

The base, debian:bookworm-slim, is made by debootstrap from Debian's packages.  Everything is kept in the
user's cache, in a store of its own that `docker` and `podman` do not see.  Pip's settings, certificates and
local wheels of this machine are lent to the build and stay out of the image.  A Horovod wheel that
`hvd-adaptive horovod install` or `make` has built is taken instead of compiling it again.
"""

from __future__ import annotations

import configparser
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hvd_adaptive.setup.horovod import cache_folder  # noqa: E402

BASE = "docker.io/library/debian:bookworm-slim"
FRAMEWORKS = ("torch", "tensorflow")


def missing() -> str | None:
    """A sentence that says what building needs and this machine lacks, or None."""
    if os.geteuid() != 0:
        return "Building an image without a Docker engine needs root: run this with sudo."
    lacking = [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]
    if lacking:
        return f"Building an image needs {' and '.join(lacking)}: run apt-get install {' '.join(lacking)}"
    return None


def buildah(*words: str | Path, output: bool = False) -> str:
    """Run buildah on our own store; its output is returned, or shown where ``output`` is false."""
    answer = subprocess.run(
        buildah_command(*words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if output else None,
        text=True,
    )
    if answer.returncode != 0:
        raise RuntimeError(f"buildah {words[0]} failed with {answer.returncode}")
    return (answer.stdout or "").strip()


def buildah_command(*words: str | Path) -> list[str]:
    store = cache_folder() / "images"
    places = ["--root", str(store / "storage"), "--runroot", str(store / "run")]
    return ["buildah", *places, *map(str, words)]


SLOW_INPUTS = (
    *("constraints.txt", "pyproject.toml", "docker/install.py", "docker/trim.py", "docker/Dockerfile"),
    *("hvd_adaptive/__init__.py", "hvd_adaptive/core/__init__.py", "hvd_adaptive/core/errors.py"),
    "hvd_adaptive/setup/*.py",
)
"""What the layers that take minutes are made from."""


def tag(frameworks: Sequence[str] = FRAMEWORKS) -> str:
    """Names an image by its frameworks and by what its slow layers are made from."""
    digest = hashlib.sha256()
    for pattern in SLOW_INPUTS:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"localhost/hvd-adaptive:{'-'.join(frameworks)}-{digest.hexdigest()[:12]}"


def built(frameworks: Sequence[str] = FRAMEWORKS) -> bool:
    """Whether the store has an image whose slow layers are those of today; its code may be older."""
    if missing() is not None or not (cache_folder() / "images" / "storage").exists():
        return False
    answer = subprocess.run(
        buildah_command("inspect", "--type", "image", tag(frameworks)), capture_output=True
    )
    return answer.returncode == 0


def size(frameworks: Sequence[str] = FRAMEWORKS) -> int:
    """Bytes of all files of the image, uncompressed, as `docker images` tells them."""
    with mounted(tag(frameworks)) as root:
        answer = subprocess.run(
            ["du", "--summarize", "--one-file-system", "--block-size=1", root],
            capture_output=True,
            text=True,
            check=True,
        )
    return int(answer.stdout.split()[0])


@contextlib.contextmanager
def container(image: str, *options: str | Path) -> Iterator[str]:
    """A container, its root file system a writable layer over the image's; its name."""
    name = buildah("from", "--pull-never", *options, image, output=True)
    try:
        yield name
    finally:
        buildah("rm", name, output=True)


@contextlib.contextmanager
def mounted(image: str) -> Iterator[Path]:
    """The root file system of a new container."""
    with container(image) as name:
        yield Path(buildah("mount", name, output=True))


def build(frameworks: Sequence[str] = FRAMEWORKS) -> str:
    """Build the image, as far as it is not built already; return its tag."""
    if not frameworks or set(frameworks) - set(FRAMEWORKS):
        raise ValueError(f"frameworks={list(frameworks)} must be torch, tensorflow, or both.")
    frameworks = [name for name in FRAMEWORKS if name in frameworks]
    folder = cache_folder() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock, tempfile.TemporaryDirectory() as lent:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_base()
        wheels = cache_folder() / "wheels"
        wheels.mkdir(parents=True, exist_ok=True)
        buildah(
            *("bud", "--isolation", "chroot", "--layers", "--pull-never", "--format", "docker"),
            *("--volume", f"{wheels}:/wheels", *_pip_settings(Path(lent))),
            *("--build-arg", f"FRAMEWORKS={' '.join(frameworks)}", *_torch_index()),
            *("--file", ROOT / "docker" / "Dockerfile", "--tag", tag(frameworks), ROOT),
        )
    return tag(frameworks)


def make_base() -> None:
    """Make debian:bookworm-slim from Debian's packages, once."""
    known = subprocess.run(buildah_command("inspect", "--type", "image", BASE), capture_output=True)
    if known.returncode == 0:
        return
    root = cache_folder() / "images" / "base"
    shutil.rmtree(root, ignore_errors=True)
    mirror = "http://deb.debian.org/debian"
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", root, mirror], check=True)
    (root / "etc" / "apt" / "sources.list").write_text(
        f"deb {mirror} bookworm main\ndeb {mirror} bookworm-updates main\n"
        f"deb {mirror}-security bookworm-security main\n"
    )
    # apt keeps no caches of its own in an image
    (root / "etc" / "apt" / "apt.conf.d" / "image").write_text(
        'Dir::Cache::pkgcache "";\nDir::Cache::srcpkgcache "";\nAcquire::Languages "none";\n'
    )
    # what makes it slim: no documentation, now and in what is installed later
    excluded = [
        f"/usr/share/{name}" for name in ("doc", "man", "info", "locale", "groff", "linda", "lintian")
    ]
    lines = [f"path-exclude {path}/*\n" for path in excluded]
    (root / "etc" / "dpkg" / "dpkg.cfg.d" / "slim").write_text("".join(lines))
    for path in [*excluded, "/var/cache/apt", "/var/lib/apt/lists", "/var/log"]:
        for entry in (root / path[1:]).glob("*"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    (root / "var" / "cache" / "apt" / "archives" / "partial").mkdir(parents=True)
    name = buildah("from", "scratch", output=True)
    buildah("copy", "--quiet", name, root, "/", output=True)
    buildah("config", "--cmd", "bash", name)
    buildah("commit", "--quiet", "--rm", name, BASE, output=True)
    shutil.rmtree(root)


def _pip_settings(folder: Path) -> list[str]:
    """Volumes with which pip in the build has the settings of this machine's pip."""
    said = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    settings: dict[str, str] = {}
    for line in said.stdout.splitlines():
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = value.strip("'\"")
    options = []
    for name, value in list(settings.items()):
        words = []
        for word in value.split():
            if word.startswith("file:"):
                continue  # an index on this machine; what it has is elsewhere too
            if word.startswith("/") and Path(word).exists():
                # not lent in its own place, which belongs to the packages of the image
                place = f"/lent/{len(options) // 2}"
                options += ["--volume", f"{word}:{place}:ro"]
                word = place
            words.append(word)
        settings[name] = " ".join(words)
        if not words:
            del settings[name]
    parser = configparser.RawConfigParser()
    parser["global"] = settings
    with (folder / "pip.conf").open("w") as file:
        parser.write(file)
    return [*options, "--volume", f"{folder / 'pip.conf'}:/etc/pip.conf:ro"]


def _torch_index() -> list[str]:
    """Where this machine's pip has CPU builds of PyTorch by itself, the index of them is not asked."""
    from hvd_adaptive.setup.venv import CPU_INDEX, _answers

    return [] if _answers(CPU_INDEX) else ["--build-arg", "TORCH_INDEX="]


def main() -> None:
    lack = missing()
    if lack is not None:
        sys.exit(lack)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the build too
    match sys.argv[1:]:
        case ["build", *frameworks]:
            name = build(frameworks or FRAMEWORKS)
            print(f"{name}: {size(frameworks or FRAMEWORKS) / 1e9:.2f} GB")
        case ["sizes"]:
            for frameworks in (FRAMEWORKS, ("torch",), ("tensorflow",)):
                if built(frameworks):
                    print(f"{' and '.join(frameworks)}: {size(frameworks) / 1e9:.2f} GB")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
