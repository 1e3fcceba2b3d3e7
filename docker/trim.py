"""The last step of the images' build stage: remove what only compiling or testing the packages needs.

    python docker/trim.py

Run by the Python that is trimmed, with PYTHONPATH the checkout.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from hvd_adaptive.setup.horovod import Target


def main() -> None:
    site = Path(sysconfig.get_path("purelib"))
    # headers and tools to compile with
    for path in ("torch/include", "torch/share", "tensorflow/include", "clang"):
        shutil.rmtree(site / path, ignore_errors=True)
    # symbols for debuggers; libraries that wheels were repaired with do not bear this, so only these
    for pattern in ("tensorflow/*.so.2", "torch/lib/libtorch_*.so", "llvmlite/**/*.so", "horovod/**/*.so"):
        for library in site.glob(pattern):
            subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)
    for pattern in ("*.a", "*.pyx", "*.pxd"):
        for file in site.rglob(pattern):
            file.unlink()
    for package in (
        "numpy",
        "scipy",
        "sklearn",
        "pandas",
        "matplotlib",
        "numba",
        "joblib",
        "h5py",
        "mlxtend",
    ):
        for folder in sorted(site.joinpath(package).rglob("tests"), reverse=True):
            # numba and NumPy import theirs
            if package not in ("numba", "numpy"):
                shutil.rmtree(folder, ignore_errors=True)
    for folder in list(site.rglob("__pycache__")):
        shutil.rmtree(folder, ignore_errors=True)
    for framework in Target.inspect(sys.executable).frameworks:  # nothing was removed that it needs
        program = f"import horovod.{framework} as hvd; assert hvd.gloo_built()"
        subprocess.run([sys.executable, "-B", "-c", program], check=True)


if __name__ == "__main__":
    main()
