"""The ``horovodrun`` fixture: run a function or a script on several ranks under the real launcher.

    def sum_of_ranks(scale):            # a module-level function beside the test
        import horovod.torch as hvd

        hvd.init()
        return hvd.allreduce(torch.tensor([scale * hvd.rank()]), op=hvd.Sum).numpy()

    def test_sum(horovodrun):
        run = horovodrun(sum_of_ranks, 2.0, np=2)
        assert run.results[0] == run.results[1] == 2.0

A script (a path, relative to ``tests/parallel/workers``) is run as it is; it hands a result back
with ``from call import report; report(value)``.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

WORKERS = Path(__file__).parent / "workers"
REPOSITORY = Path(__file__).parents[2]
TAG = "HVD_ADAPTIVE_TEST_RUN"


@dataclass(frozen=True)
class Run:
    """What a run left behind.  ``results[r]`` is what rank r returned or reported (None if nothing)."""

    returncode: int | None  # None: it ran past its time
    results: list[Any]
    output: str

    def output_of(self, rank: int) -> str:
        """The lines that one rank printed, without horovodrun's prefix."""
        prefix = re.compile(rf"\[{rank}\]<std(?:out|err)>:")
        lines = (prefix.split(line, maxsplit=1) for line in self.output.splitlines())
        return "\n".join(parts[1] for parts in lines if len(parts) == 2)


@pytest.fixture
def horovodrun(tmp_path: Path) -> Callable[..., Run]:
    """``horovodrun(function_or_script, *args, np=2, env=None, timeout=240, check=True, **kwargs) -> Run``.

    Args:
        function_or_script: a module-level function, called as ``function(*args, **kwargs)`` on every
            rank (arguments and result must pickle), or a script's path, run with ``args`` as its words.
        np: number of ranks, all on this machine, over Gloo.
        hosts: names of this machine, for as many hosts: "localhost:2,127.0.0.1:2".
        discovery: a script that prints the hosts, for an elastic job of ``np`` ranks or fewer.
        env: environment variables to add.
        timeout: seconds, after which this run's processes (and no others) are ended.
        check: fail the test, with the output, unless every rank ended well and in time.
    """

    def launch(
        target: Callable[..., Any] | str | Path,
        *args: Any,
        np: int = 2,
        hosts: str | None = None,
        discovery: Path | None = None,
        env: dict[str, str] | None = None,
        timeout: float = 240,
        check: bool = True,
        **kwargs: Any,
    ) -> Run:
        tag = uuid.uuid4().hex
        folder = tmp_path / f"run-{tag}"
        folder.mkdir()
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "HOROVOD_CYCLE_TIME": "1",  # milliseconds: steps are short here
            **_finds(folder),
            TAG: tag,
            **(env or {}),
        }
        command = [*_horovodrun(np, hosts, discovery), *_command(target, args, kwargs, folder)]
        returncode, output = _run_bounded(command, environment, tag, timeout)
        results = [_load(folder / f"rank-{rank}.pickle") for rank in range(np)]
        if check and returncode != 0:
            reason = f"ran past {timeout:g} s" if returncode is None else f"exited with {returncode}"
            pytest.fail(f"horovodrun -np {np} {target} {reason}:\n{output[-8000:]}", pytrace=False)
        return Run(returncode, results, output)

    return launch


@pytest.fixture
def over_links(tmp_path: Path) -> Callable[..., list[Any]]:
    """``over_links(machines, function, *args, ranks=2, timeout=200)``: a module-level function on every rank
    of all ``machines`` (the network benchmark's ``Hosts``, entered), and what each rank returned."""

    def launch(
        machines: Any, function: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 200
    ) -> list[Any]:
        folder = tmp_path / f"run-{uuid.uuid4().hex}"
        folder.mkdir()
        command = _command(function, args, {}, folder)
        run = machines.horovodrun(command, ranks=ranks, env=_finds(folder), timeout=timeout)
        assert run.returncode == 0, run.output[-5000:]
        return [_load(folder / f"rank-{rank}.pickle") for rank in range(ranks * len(machines))]

    return launch


def _finds(folder: Path) -> dict[str, str]:
    """What tells a rank where its modules are, and where its result goes."""
    return {
        "PYTHONPATH": os.pathsep.join([str(WORKERS), str(REPOSITORY)]),
        "HVD_ADAPTIVE_RESULTS": str(folder),
    }


def _horovodrun(np: int, hosts: str | None, discovery: Path | None) -> list[str]:
    elastic = ["--host-discovery-script", str(discovery), "--min-np", "1", "--max-np", str(np)]
    return [
        *(sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(np)),
        *(elastic if discovery else ("-H", hosts or f"localhost:{np}")),
        # a busy machine may take long to import a framework on every rank
        *("--start-timeout", "120", "--gloo-timeout-seconds", "120"),
    ]


def _command(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], folder: Path) -> list[str]:
    if not callable(target):
        return [sys.executable, str(WORKERS / target), *map(str, args)]
    if "<" in target.__qualname__:
        raise ValueError(
            f"{target.__qualname__} must be a module-level function, so that a rank can import it"
        )
    call = folder / "call.pickle"
    call.write_bytes(pickle.dumps((inspect.getsourcefile(target), target.__qualname__, args, kwargs)))
    return [sys.executable, str(WORKERS / "call.py"), str(call)]


def _run_bounded(
    command: list[str], environment: dict[str, str], tag: str, timeout: float
) -> tuple[int | None, str]:
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # horovodrun ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        _end_leftovers(tag)
        output, _ = process.communicate()
        return None, output
    finally:
        _end_leftovers(tag)


def _end_leftovers(tag: str) -> None:
    """End the processes of this run that outlived the launcher; ours carry ``tag`` in their environment."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(TAG) == tag:
                process.kill()
        except psutil.Error:
            continue


def _load(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None
