"""The proof that a Horovod works: two processes, started by horovodrun, agree on a sum.

``check(python)`` starts them; each runs this file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .command import diagnose
from .machine import SetupError


def check(
    python: str | Path, frameworks: Sequence[str], environment: Mapping[str, str], seconds: float = 300
) -> None:
    """Allreduce on 2 processes through each of ``frameworks``.

    Args:
        python: the Python that has Horovod.
        frameworks: some of "torch" and "tensorflow".
        environment: for the processes.
        seconds: after which they are ended; importing both frameworks on a busy machine takes a while.

    Raises:
        SetupError: a process failed, or they did not end in time.
    """
    words = [
        *(str(python), "-m", "horovod.runner.launch", "-np", "2", "-H", "localhost:2", "--gloo"),
        *("--start-timeout", "120", "--gloo-timeout-seconds", "120"),
        *(str(python), "-m", __name__, *frameworks),
    ]
    process = subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # horovodrun's ranks end with it
        process.wait()
        raise SetupError(
            f"Two processes under horovodrun did not agree on a sum within {seconds:g} s: check that the "
            "loopback interface works and that the machine is not overloaded, then run this again."
        ) from None
    if process.returncode != 0:
        raise SetupError(f"Two processes under horovodrun could not agree on a sum: {diagnose(output)}")


def _on_rank(framework: str) -> None:
    if framework == "torch":
        import horovod.torch as hvd
        import torch

        hvd.init()
        total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum, name="check.torch")
    else:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        hvd.init()
        total = hvd.allreduce(tf.constant([float(hvd.rank() + 1)]), op=hvd.Sum, name="check.tensorflow")
    expected = hvd.size() * (hvd.size() + 1) / 2
    if float(total[0]) != expected:
        raise SystemExit(f"error: {framework}: the sum is {float(total[0])} and should be {expected}")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        _on_rank(name)
