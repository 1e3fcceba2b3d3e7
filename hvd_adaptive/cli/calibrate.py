"""``hvd-adaptive calibrate``: what the link between the ranks charges, as a file for ``cost=``."""

from __future__ import annotations

import dataclasses
import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ..core.errors import ConfigurationError, MissingDependencyError
from ..core.link import Link, measure
from ..core.timing import KEPT, StepClock
from ..horovod import load


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--json", "json_path", default="calibrated.json", show_default=True, metavar="FILE")
@click.option(
    "--framework",
    type=click.Choice(["torch", "tensorflow"]),
    help="Whose collectives to time; by default the first that Horovod was built for.",
)
@click.option("--repeats", default=9, show_default=True, type=click.IntRange(3, 1000), help="Of each size.")
@click.option(
    "--longest",
    default=0.5,
    show_default=True,
    type=click.FloatRange(0.001, 60),
    help="Seconds; no size above the first that takes so long is tried.",
)
@click.argument("script", nargs=-1, type=click.UNPROCESSED)
def calibrate(
    json_path: str, framework: str | None, repeats: int, longest: float, script: tuple[str, ...]
) -> None:
    """Time allgather and allreduce between the ranks, and fit seconds against bytes.

    \b
      horovodrun -np 4 hvd-adaptive calibrate --json calibrated.json
      horovodrun -np 4 hvd-adaptive calibrate --json calibrated.json train.py --epochs 1

    Then pass Compression.adaptive(..., cost="calibrated.json").  With a SCRIPT and its options, a
    training script that uses a compressor of hvd_adaptive.torch, its first steps are run too, and the
    time that a step computes is written beside; without one it is measured in training.
    """
    hvd, collectives = _joined(framework)
    console = Console(quiet=hvd.rank() != 0)
    console.print(f"timing the collectives of {hvd.size()} ranks")

    def report(count: int, seconds: Sequence[float]) -> None:
        console.print(
            f"  {4 * count / 1024:10,.1f} KiB: allgather {1e3 * seconds[0]:9.3f} ms, "
            f"allreduce {1e3 * seconds[1]:9.3f} ms"
        )

    link = measure(collectives, hvd.size(), repeats=repeats, longest=longest, report=report)
    if script:
        console.print(f"running {script[0]} for the time of a step")
        (compute,) = collectives.mean([_compute_of(script)])
        link = dataclasses.replace(link, compute=compute)
    if hvd.rank() == 0:
        link.save(json_path)
        console.print(_table(link))
        console.print(f"written to {Path(json_path).resolve()}")


def _joined(framework: str | None) -> tuple[Any, Any]:
    """Horovod, initialised, and the collectives to time."""
    for name in (framework,) if framework else ("torch", "tensorflow"):
        try:
            hvd = load(name)
            collectives = importlib.import_module(f"hvd_adaptive.{name}.link").Collectives
            break
        except (MissingDependencyError, ModuleNotFoundError):
            continue
    else:
        raise MissingDependencyError(
            f"horovod.{framework or 'torch'} cannot be imported; build Horovod with: "
            "hvd-adaptive horovod install"
        )
    hvd.init()
    if hvd.size() < 2:
        raise ConfigurationError(
            "a link has two ends: start this under horovodrun, on the hosts where you train, such as "
            "horovodrun -np 2 -H a:1,b:1 hvd-adaptive calibrate"
        )
    return hvd, collectives(hvd.global_process_set)


class _Enough(BaseException):
    """Ends the user's script from within, past any ``except Exception``."""


def _compute_of(script: Sequence[str]) -> float:
    """Seconds that a step of a script computes, median over some steps.

    Raises ConfigurationError where it ends before.
    """
    found: list[StepClock] = []

    def watch(clock: StepClock) -> None:
        found[:] = [clock]
        if clock.steps >= KEPT:
            raise _Enough

    argv, StepClock.watch = sys.argv, watch
    sys.argv = list(script)
    try:
        runpy.run_path(script[0], run_name="__main__")
    except _Enough:
        pass
    finally:
        sys.argv, StepClock.watch = argv, None
    if not found or found[0].steps < 2:
        raise ConfigurationError(
            f"{script[0]} took no two steps with a compressor of hvd_adaptive.torch; use one in "
            "hvd.DistributedOptimizer(compression=...), or leave the script out"
        )
    return found[0].compute


def _table(link: Link) -> Table:
    table = Table(title=f"seconds = fixed + bytes x per byte, {link.world_size} ranks")
    for column in ("collective", "fixed", "bytes of a rank per second", "median error of the fit"):
        table.add_column(column, justify="left" if column == "collective" else "right")
    for name, line in (("allgather", link.allgather), ("allreduce", link.allreduce)):
        speed = f"{1e-6 / line.per_byte:,.1f} MB" if line.per_byte else "beyond measure"
        table.add_row(name, f"{1e3 * line.fixed:.3f} ms", speed, f"{line.error:.0%}")
    if link.compute:
        table.add_row("a step's computation", f"{1e3 * link.compute:.3f} ms", "", "")
    return table
