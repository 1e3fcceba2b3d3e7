"""``hvd-adaptive reproduce cat``: the tuning rule against fixed settings on logistic regression."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..core.cost import Affine, LinkTime, Packets
from ..core.efficiency import Family
from ..core.errors import ConfigurationError

if TYPE_CHECKING:  # needs SciPy and scikit-learn, so only the command itself imports it
    from ..solvers.cat import Comparison, Curves, Experiment, MakeCost, Run

FAMILIES: dict[str, str] = {"sparsify": "S", "sign": "S+Q", "stochastic": "SS"}
"""The papers' letters."""
COSTS = ("payload", "affine", "packets", "time")


@click.command()
@click.option(
    "--data",
    required=True,
    help="A name (a9a, mushrooms, phishing, w8a, breast_cancer, digits) or a path to an svmlight file.",
)
@click.option("--data-dir", type=click.Path(exists=True, file_okay=False), help="Folder of the named sets.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for every run, as JSON.",
)
@click.option(
    "--plots", type=click.Path(file_okay=False, path_type=Path), help="Folder for the plots, as PNG."
)
@click.option("--l2", default=1e-4, show_default=True, help="Weight of the l2 regulariser.")
@click.option("--iterations", default=6000, show_default=True, help="The most iterations of a run.")
@click.option(
    "--target-steps",
    default=300,
    show_default=True,
    help="The target is the loss after that many full gradient steps.",
)
@click.option(
    "--family",
    "families",
    multiple=True,
    type=click.Choice(list(FAMILIES)),
    help="Repeatable; all by default.",
)
@click.option("--cost", "costs", multiple=True, type=click.Choice(COSTS), help="Repeatable; all by default.")
@click.option(
    "--ratio",
    "ratios",
    multiple=True,
    type=float,
    help="T/d of a fixed setting; repeatable; 1e-4, 1e-3, 1e-2, 0.1 and 1 by default.",
)
@click.option("--value-bits", default=32, show_default=True, help="Bits of a value or norm.")
@click.option(
    "--affine",
    nargs=2,
    type=float,
    default=(0.125, 128.0),
    show_default=True,
    help="Cost per bit and per message (the defaults are bytes).",
)
@click.option(
    "--packets",
    nargs=3,
    type=int,
    default=(512, 64, 64),
    show_default=True,
    help="Bytes of payload and of header per packet, and per message.",
)
@click.option(
    "--link",
    nargs=3,
    type=float,
    default=(1e6, 1e-3, 1e-3),
    show_default=True,
    help="Bandwidth in bit/s, latency and compute time of an iteration in s.",
)
@click.option(
    "--workers", default=1, show_default=True, help="Shards of the rows; each worker tunes its own T."
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    help="Of the stochastic family, and of the deal of rows to workers.",
)
def cat(
    data: str,
    data_dir: str | None,
    json_path: Path | None,
    plots: Path | None,
    l2: float,
    iterations: int,
    target_steps: int,
    families: Sequence[Family],
    costs: Sequence[str],
    ratios: Sequence[float],
    value_bits: int,
    affine: tuple[float, float],
    packets: tuple[int, int, int],
    link: tuple[float, float, float],
    workers: int,
    seed: int,
) -> None:
    """The CAT paper's experiment (arXiv 2003.06377) on l2-regularised logistic regression.

    Compressed gradient descent, with T chosen by the rule for each family of messages and each
    cost model, against fixed T, the full gradient, and the older dynamic rule for signs; all
    until the loss that full gradient descent has after --target-steps.
    """
    from ..solvers import cat as experiments
    from ..solvers.data import arrange, load
    from ..solvers.problems import LogisticRegression

    if plots is not None:
        import matplotlib  # noqa: F401  # missing: said now, not after the runs
    for folder in (plots, json_path.parent if json_path else None):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    if workers < 1:
        raise ConfigurationError(f"--workers must be at least 1, not {workers}")

    console = Console(stderr=True)
    with console.status("reading the data, and the smoothness of the problem"):
        dataset = load(data, data_dir)
        if not dataset.binary:
            raise ConfigurationError(f"--data {data} has more than two classes, and logistic regression two")
        if workers > 1:
            dataset = arrange(dataset, seed=seed)
        problem = LogisticRegression(dataset.features, dataset.targets, l2=l2, workers=workers)
        models: dict[str, MakeCost] = {
            "payload": lambda payload: payload,
            "affine": lambda payload: Affine(payload, *affine),
            "packets": lambda payload: Packets(payload, *packets),
            "time": lambda payload: LinkTime(payload, *link, world_size=max(2, workers)),
        }
        experiment = experiments.Experiment(
            problem,
            {name: models[name] for name in costs or COSTS},
            families or tuple(FAMILIES),  # type: ignore[arg-type]  # click.Choice makes them so
            ratios or experiments.RATIOS,
            target_steps,
            iterations,
            value_bits,
            seed,
        )
    runs: list[Run] = []
    jobs = experiment.jobs()
    columns = (TextColumn("{task.description:42}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(jobs))
        for name, job in jobs:
            progress.update(task, description=name)
            runs += job()
            progress.advance(task)
    curves = experiment.curves()
    comparisons = experiments.compare(runs)

    report(Console(), dataset.name, experiment, comparisons)
    if json_path is not None:
        summary = as_dict(dataset.name, experiment, runs, curves, comparisons)
        json_path.write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n")
        console.print(f"[dim]runs: {json_path}")
    if plots is not None:
        from . import reproduce_cat_plots

        for path in reproduce_cat_plots.draw(plots, dataset.name, experiment, runs, curves):
            console.print(f"[dim]plot: {path}")


def as_dict(
    name: str,
    experiment: Experiment,
    runs: Sequence[Run],
    curves: Sequence[Curves],
    comparisons: Sequence[Comparison],
) -> dict[str, Any]:
    """Everything that was run, as numbers, strings, lists and dictionaries."""
    problem = experiment.problem
    kept = np.unique(np.geomspace(1, problem.dimension, 1000).astype(int)) - 1  # of the T of a curve
    return {
        "experiment": "cat",
        "data": name,
        "rows": problem.rows,
        "dimension": problem.dimension,
        "workers": problem.workers,
        "l2": problem.l2,
        "smoothness": problem.smoothness.mean,
        "target_steps": experiment.target_steps,
        "target_loss": experiment.target,
        "cap": experiment.cap,
        "seed": experiment.seed,
        "cost_models": {name: repr(experiment.cost(name, "sparsify")) for name in experiment.costs},
        "runs": [run.as_dict() for run in runs],
        "comparisons": [
            {
                "family": c.family,
                "cost_model": c.cost_name,
                "unit": c.unit,
                "tuned_cost": _cost(c.tuned),
                "best_fixed_sparsity": c.best_fixed.sparsity if c.best_fixed else None,
                "best_fixed_cost": _cost(c.best_fixed),
                "dense_cost": _cost(c.dense),
                "dynamic_cost": _cost(c.dynamic),
                "full_gradient_cost": _cost(c.full),
                "quotient": c.quotient,
            }
            for c in comparisons
        ],
        "curves": [
            {
                "family": c.family,
                "cost_model": c.cost_name,
                "unit": c.cost.unit,
                "best_sparsity": c.best.sparsity,
                "best_efficiency": c.best.efficiency,
                "sparsity": c.curve.sparsity[kept].tolist(),
                "improvement": c.curve.improvement[kept].tolist(),
                "cost": c.curve.cost[kept].tolist(),
                "efficiency": c.curve.efficiency[kept].tolist(),
            }
            for c in curves
        ],
    }


def report(console: Console, name: str, experiment: Experiment, comparisons: Sequence[Comparison]) -> None:
    """One table: what reaching the target cost, by family and cost model."""
    problem = experiment.problem
    console.print(
        f"\n{name} ({problem.rows} x {problem.dimension}), l2 = {problem.l2:g}: cost per worker, "
        f"and iterations, until the loss of {experiment.target_steps} full gradient steps, "
        f"{experiment.target:.5g}.  "
        f"-: not reached in {experiment.cap} iterations.",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, pad_edge=False, collapse_padding=True)
    table.add_column("cost\nfamily")
    for column in ("tuned", "best\nfixed T", "T = d", "dynamic", "full\ngradient", "tuned /\nfixed"):
        table.add_column(column, justify="right")
    for c in comparisons:
        table.add_row(
            f"{c.cost_name}\n{FAMILIES[c.family]}",
            _cell(c.tuned, count=True),
            _cell(c.best_fixed, count=True) if c.best_fixed else "-",
            _cell(c.dense) if c.dense else "",
            _cell(c.dynamic, count=True) if c.dynamic else "",
            _cell(c.full),
            f"{c.quotient:.2f}" if c.quotient is not None else "-",
        )
    console.print(table)


def _cost(run: Run | None) -> float | None:
    return float(run.spent[-1]) if run is not None and run.trajectory.reached else None


_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SYMBOLS = {"bit": "bit", "byte": "B", "second": "s"}


def _cell(run: Run, count: bool = False) -> str:
    """Cost, iterations, and the (mean) T."""
    cost = _cost(run)
    if cost is None:
        return "-"
    scale, prefix = next((p for p in _PREFIXES if cost >= p[0]), (1.0, ""))
    symbol = _SYMBOLS.get(run.cost.unit, "")
    found = f"{cost / scale:.4g} {prefix}{symbol}\n{run.trajectory.rounds}"
    return f"{found}, T={run.trajectory.sparsities.mean():.3g}" if count else found
