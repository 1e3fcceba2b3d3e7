"""``hvd-adaptive bench``: what compression costs here, and what tuning is worth."""

from __future__ import annotations

import click


@click.group()
def bench() -> None:
    """Measure: the kernels' speed, and adaptive against every fixed ratio in hindsight."""


@bench.command()
@click.option("--json", "json_path", required=True, type=click.Path(dir_okay=False), help="Where to write.")
@click.option("--dimension", default=25_000_000, show_default=True, type=click.IntRange(1000))
@click.option("--ratio", "ratios", multiple=True, default=(0.01, 0.001), show_default=True)
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(1))
def kernels(json_path: str, dimension: int, ratios: tuple[float, ...], repeats: int) -> None:
    """Compress and decompress one tensor, against an in-place add of the same tensor."""
    from ..simulation.kernels import run

    run(json_path, dimension, ratios, repeats)


@bench.command()
@click.option("--json", "json_path", required=True, type=click.Path(dir_okay=False), help="Where to write.")
@click.option("--task", "tasks", multiple=True, default=("mlp", "language"), show_default=True)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--workers", default=4, show_default=True, type=click.IntRange(2, 1024))
@click.option("--steps", default=4000, show_default=True, type=click.IntRange(10), help="Of a run at most.")
@click.option("--target", type=float, help="Held-out loss to reach, instead of the task's own.")
@click.option("--r", "ratios", multiple=True, default=(1.0, 10.0, 100.0), show_default=True)
@click.option(
    "--runs",
    type=click.Path(dir_okay=False),
    help="File of finished runs, to take from and to add to (start afresh after a change of the code).",
)
def hindsight(
    json_path: str,
    tasks: tuple[str, ...],
    seeds: int,
    workers: int,
    steps: int,
    target: float | None,
    ratios: tuple[float, ...],
    runs: str | None,
) -> None:
    """Time to a target loss: adaptive with no settings, every fixed ratio, and a tenth for communication.

    "r" is how many times as long as a step's computation a dense exchange takes.
    """
    from ..simulation.hindsight import run

    run(json_path, tasks, seeds, workers, steps, target, ratios, runs)
