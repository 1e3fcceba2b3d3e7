"""Trains one task under some contestants, one after the other, and writes a JSON file for each run.

    horovodrun -np 2 python benchmarks/network/train.py --out DIR --contestant dense --contestant adaptive

A run that is there already is not repeated.  All contestants of a launch are Horovod's or all are
PyTorch's own; the latter are started with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, such as by
torchrun.  run.py starts all of this on hosts with links of given rates.

The clock starts after the first step, in which ranks connect, measure their link and compile, and stands
still while the held-out loss is computed.  With ``--pace N`` nothing is evaluated: N steps are timed, after
some that are not.
"""

from __future__ import annotations

import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from contestants import GROUPS, Contestant, Group, contestant, head
from tasks import task

from hvd_adaptive.cli.report_runs import reached, run_name
from hvd_adaptive.simulation.tasks import Task

LOCAL_STEPS = 7  # of which the first two are not counted


@click.command()
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--task", "task_name", default="mlp", show_default=True, help="mlp, resnet or language.")
@click.option("--contestant", "names", multiple=True, required=True, help="May be given several times.")
@click.option("--seed", "seeds", multiple=True, type=int, default=(0,), help="May be given several times.")
@click.option("--steps", default=300, show_default=True, type=click.IntRange(2), help="At most.")
@click.option("--check-every", default=10, show_default=True, type=click.IntRange(1))
@click.option(
    "--target",
    type=float,
    help="Held-out loss (mean of some checks) at which a run ends; by default the task's own.",
)
@click.option("--pace", type=click.IntRange(1), help="Only time so many steps.")
@click.option(
    "--warm-up", default=6, show_default=True, type=click.IntRange(1), help="Before --pace's steps."
)
@click.option("--rate", type=float, help="Of the links in bits per second, for the record.")
@click.option("--interface", help="Network interface whose bytes are counted.")
@click.option(
    "--calibrated", type=click.Path(dir_okay=False, path_type=Path), help="hvd-adaptive calibrate's."
)
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Of a rank.")
def main(
    out: Path,
    task_name: str,
    names: tuple[str, ...],
    seeds: tuple[int, ...],
    steps: int,
    check_every: int,
    target: float | None,
    pace: int | None,
    warm_up: int,
    rate: float | None,
    interface: str | None,
    calibrated: Path | None,
    threads: int,
) -> None:
    """Train one task under some contestants."""
    torch.set_num_threads(threads)
    entries = [contestant(name) for name in names]
    launchers = {entry.launcher for entry in entries}
    if len(launchers) > 1:
        raise click.UsageError("--contestant: Horovod's and PyTorch's own need a launch each")
    chosen = task(task_name)
    goal = chosen.target if target is None else target
    group = GROUPS[launchers.pop()]()
    wire = Wire(interface, group.local_size)
    kind = "pace" if pace else "train"
    for seed in seeds:
        for entry in entries:
            own = head(kind, task_name, entry, seed, group.size, rate) | {
                "target": goal,
                "most_steps": steps,
                "cores": os.cpu_count(),
                "versions": {"torch": torch.__version__, "python": platform.python_version()},
            }
            path = out / run_name(own)
            # What rank 0 sees decides for all.
            if group.mean([float(group.rank == 0 and path.exists())])[0] > 0:
                continue
            try:
                run = Run(chosen, entry, seed, group, wire, calibrated)
                if pace:
                    found = run.pace(warm_up, pace)
                else:
                    found = run.train(steps, check_every, goal)
            except (RuntimeError, ValueError, TypeError) as error:
                # The ranks may be out of step now, so that this launch cannot go on.
                if group.rank == 0:
                    _write(path, own | {"failed": f"{type(error).__name__}: {error}"})
                raise
            if group.rank == 0:
                _write(path, own | found)
                print(f"{path.name}: {len(found['step_seconds'])} steps", flush=True)
    group.close()


class Wire:
    """The bytes that an interface has sent, shared among the ranks of its host."""

    def __init__(self, interface: str | None, local_size: int) -> None:
        self._local_size = local_size
        self._path = None
        if interface is not None:
            self._path = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
            if not self._path.exists():
                raise click.UsageError(f"--interface: this host has no {interface}")

    @property
    def there(self) -> bool:
        return self._path is not None

    def bits(self) -> float:
        return 8 * int(self._path.read_text()) / self._local_size if self._path else 0.0


class Run:
    """One contestant, one seed."""

    def __init__(
        self,
        chosen: Task,
        entry: Contestant,
        seed: int,
        group: Group,
        wire: Wire,
        calibrated: Path | None,
    ) -> None:
        torch.manual_seed(seed)
        model = chosen.model()
        self._task, self._group, self._wire = chosen, group, wire
        self._parameters = sum(p.numel() for p in model.parameters())
        self._compute = self._local(copy.deepcopy(model), seed)
        self._session = group.session(entry.name, model, _optimizer(chosen, model), calibrated)
        self._batches = chosen.batches(group.rank, seed)
        self._seconds: list[float] = []
        self._setup = self._step()
        group.mean([0.0])
        self._start = self._counters()

    def train(self, steps: int, check_every: int, target: float) -> dict[str, Any]:
        """Until the held-out loss, mean of a few checks, is at most ``target``, or ``steps`` are done."""
        checks: list[dict[str, float]] = []
        bits = payload = 0.0
        counted = self._start
        for step in range(2, steps + 1):
            self._seconds.append(self._step())
            if step % check_every == 0 or step == steps:
                now = self._counters()
                bits, payload = bits + now[0] - counted[0], payload + now[1] - counted[1]
                values = [self._loss(), sum(self._seconds), bits, payload]
                loss, seconds, mean_bits, mean_payload = self._group.mean(values)
                checks.append(
                    {
                        "step": step,
                        "loss": loss,
                        "seconds": seconds,
                        "bits": mean_bits,
                        "payload": mean_payload,
                    }
                )
                if reached({"checks": checks, "target": target}) is not None:
                    break
                counted = self._counters()
        if not self._wire.there:
            for check in checks:
                check["bits"] = check["payload"]
        return self._report() | {"checks": checks}

    def pace(self, warm_up: int, steps: int) -> dict[str, Any]:
        """The seconds of ``steps`` steps."""
        for _ in range(warm_up):
            self._step()
        self._group.mean([0.0])
        self._start = self._counters()
        self._seconds = [self._step() for _ in range(steps)]
        end = self._counters()
        bits, payload = self._group.mean([(end[i] - self._start[i]) / steps for i in (0, 1)])
        return self._report() | {
            "bits_per_step": bits if self._wire.there else payload,
            "payload_per_step": payload,
        }

    def _report(self) -> dict[str, Any]:
        count = len(self._seconds)
        end = self._counters()
        parts = [self._compute, (end[2] - self._start[2]) / count, (end[3] - self._start[3]) / count]
        *parts, mean = self._group.mean([*parts, sum(self._seconds) / count])
        exposed = max(0.0, mean - sum(parts))
        names = ("compute", "compress", "decompress", "communicate")
        return {
            "parameters": self._parameters,
            "steps": count + 1,
            "setup_seconds": self._setup,
            "step_seconds": [round(seconds, 6) for seconds in self._seconds],
            "parts": dict(zip(names, (*parts, exposed), strict=True)),
            "bits_from": "interface" if self._wire.there else "collectives",
            "reason": self._session.reason(),
        }

    def _counters(self) -> tuple[float, float, float, float]:
        """Bits on the wire, bits handed over, seconds of compression and of decompression."""
        return (self._wire.bits(), float(self._session.payload()), *self._session.spent())

    def _step(self) -> float:
        began = time.perf_counter()
        self._session.step(self._task.loss(self._session.model, next(self._batches)))
        return time.perf_counter() - began

    def _loss(self) -> float:
        """A rank's share of the held-out loss; the mean over the ranks is the loss."""
        inputs, targets = self._task.held_out
        mine = slice(self._group.rank, None, self._group.size)
        with torch.no_grad():
            # Not through DDP, which would prepare for a backward pass.
            model = getattr(self._session.model, "module", self._session.model)
            loss = self._task.loss(model, (inputs[mine], targets[mine])).item()
        return loss * len(targets[mine]) * self._group.size / len(targets)

    def _local(self, model: torch.nn.Module, seed: int) -> float:
        """Median seconds of a step without communication, all ranks at the same time."""
        optimizer, batches = _optimizer(self._task, model), self._task.batches(self._group.rank, seed)

        def step() -> None:
            loss = self._task.loss(model, next(batches))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        self._group.mean([0.0])
        return statistics.median([_timed(step) for _ in range(LOCAL_STEPS)][2:])


def _optimizer(chosen: Task, model: torch.nn.Module) -> torch.optim.Optimizer:
    return chosen.optimizer(list(model.parameters()))


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(document, indent=1) + "\n")
    whole.replace(path)


if __name__ == "__main__":
    main()
