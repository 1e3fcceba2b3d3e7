"""The steps of the images' build stage, run by the Python that they install into, PYTHONPATH the checkout.

python docker/install.py frameworks torch tensorflow
python docker/install.py horovod
python docker/install.py dependencies
python docker/install.py trim
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hvd_adaptive.setup.horovod import Target, WheelStore, wheel_for
from hvd_adaptive.setup.machine import SetupError
from hvd_adaptive.setup.venv import TENSORFLOW, TORCH

ROOT = Path(__file__).resolve().parents[1]
WHEELS = Path("/wheels")
CUDA = bool(os.environ.get("HVD_ADAPTIVE_CUDA"))
"""Whether this builds the image for GPUs."""


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--constraint", str(ROOT / "constraints.txt"), *words]
    print("+", *command, flush=True)
    subprocess.run(command, check=True)


def frameworks(*names: str) -> None:
    """Install PyTorch, TensorFlow or both, with the build tool of this package."""
    if not names or set(names) - {"torch", "tensorflow"}:
        sys.exit(f"FRAMEWORKS={' '.join(names)!r} must be torch, tensorflow, or both with a space between.")
    pip("setuptools>=77", "wheel")
    if "torch" in names:
        index = os.environ.get("TORCH_INDEX")
        words = ["--extra-index-url", index] if index else []
        pip(*words, f"torch=={TORCH}" if CUDA else f"torch=={TORCH}+cpu")
    if "tensorflow" in names:
        pip(f"tensorflow[and-cuda]=={TENSORFLOW}" if CUDA else f"tensorflow-cpu=={TENSORFLOW}")
        # tf-keras depends on the distribution named tensorflow, the same files once more
        pip("--no-deps", f"tf-keras=={TENSORFLOW}")


def horovod() -> None:
    """Build Horovod for what is installed, or take the wheel that /wheels has, and install it."""
    log = Path("/tmp/horovod.log")
    said = [0]

    def progress(percent: int) -> None:
        if percent // 10 > said[0] // 10:
            print(f"{percent} % compiled", flush=True)
        said[0] = percent

    try:
        wheel = wheel_for(Target.inspect(sys.executable), WheelStore(WHEELS), log, progress)
    except SetupError as error:
        if log.exists():
            print(log.read_text()[-8000:])
        sys.exit(str(error))
    pip(str(wheel))


def dependencies() -> None:
    """Install what this package and its demo need."""
    import tomllib  # of Python 3.11

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    demo = [word for word in extras["demo"] if not word.startswith(project["name"])]
    pip(*project["dependencies"], *extras["plots"])
    pip("--no-deps", *demo)  # for its digits alone: they need none of what its code needs


if __name__ == "__main__":
    step, *arguments = sys.argv[1:]
    steps = {"frameworks": frameworks, "horovod": horovod, "dependencies": dependencies}
    steps[step](*arguments)
