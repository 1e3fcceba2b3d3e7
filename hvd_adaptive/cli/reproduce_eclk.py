"""``hvd-adaptive reproduce eclk``: accelerated error compensation against its rivals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..core.compressors import VALUE_BITS
from ..core.errors import ConfigurationError

if TYPE_CHECKING:  # needs SciPy and scikit-learn, so only the command itself imports it
    from ..solvers.eclk import Schedule
    from ..solvers.problems import LinearModel

FAMILIES = ("topk", "randk", "sign", "dithering", "natural", "adaptive")
TARGETS = (1e-4, 1e-6, 1e-8)


@click.command()
@click.option(
    "--data",
    required=True,
    help="A name (a9a, mushrooms, phishing, w8a, breast_cancer, digits) or a path to an svmlight file.",
)
@click.option("--data-dir", type=click.Path(exists=True, file_okay=False), help="Folder of the named sets.")
@click.option("--workers", default=20, show_default=True, help="In-process workers, 1 to 1024.")
@click.option("--compressor", default="topk", show_default=True, type=click.Choice(FAMILIES))
@click.option("--k", default=1, show_default=True, help="Coordinates kept (levels, for dithering).")
@click.option("--l2", default=1e-3, show_default=True, help="Weight of the l2 regulariser; above 0.")
@click.option("--model", default="logistic", show_default=True, type=click.Choice(["logistic", "ridge"]))
@click.option(
    "--value",
    default="float32",
    show_default=True,
    type=click.Choice(list(VALUE_BITS)),
    help="Type of values on the wire, of all methods' sparse messages.",
)
@click.option(
    "--order",
    default="shuffled",
    show_default=True,
    type=click.Choice(["shuffled", "sorted", "given"]),
    help="How rows are dealt to workers; sorted by label makes workers unlike.",
)
@click.option(
    "--schedule",
    default="even",
    show_default=True,
    type=click.Choice(["even", "coin"]),
    help="Snapshots of ECLK and L-Katyusha: every 1/p rounds, or by a coin with probability p.",
)
@click.option("--p", type=float, help="Their probability; the share of coordinates that are sent by default.")
@click.option("--rounds", default=6000, show_default=True, help="The most rounds of a run.")
@click.option("--target", default=1e-8, show_default=True, help="Relative gap at which a run ends.")
@click.option(
    "--budget", default=40, show_default=True, help="The most runs to tune one method with; 1: no tuning."
)
@click.option("--method", "names", multiple=True, help="Repeatable; only these methods, by label.")
@click.option("--seed", default=0, show_default=True, help="Of the deal of rows and of the methods.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for the best run of every method, as JSON.",
)
@click.option(
    "--plots", type=click.Path(file_okay=False, path_type=Path), help="Folder for the plots, as PNG."
)
def eclk(
    data: str,
    data_dir: str | None,
    workers: int,
    compressor: str,
    k: int,
    l2: float,
    model: str,
    value: str,
    order: str,
    schedule: Schedule,
    p: float | None,
    rounds: int,
    target: float,
    budget: int,
    names: Sequence[str],
    seed: int,
    json_path: Path | None,
    plots: Path | None,
) -> None:
    """ECLK (arXiv 2010.00091) and its rivals on l2-regularised logistic or ridge regression.

    Every method is tuned on powers of two; gaps are relative to the first one; bits are those of
    the messages, snapshots included, averaged over workers.
    """
    from ..solvers import comparison
    from ..solvers import data as datasets
    from ..solvers.problems import LogisticRegression, Ridge

    if plots is not None:
        import matplotlib  # noqa: F401  # missing: said now, not after the runs
    for folder in (plots, json_path.parent if json_path else None):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    if p is not None and not 0 < p <= 1:
        raise ConfigurationError(f"--p {p} must be above 0 and at most 1")
    if not (l2 > 0 and target > 0 and rounds >= 1 and budget >= 1):
        raise ConfigurationError("--l2 and --target must be above 0, --rounds and --budget at least 1")

    console = Console(stderr=True)
    with console.status("reading the data, the constants and the optimum"):
        dataset = datasets.arrange(datasets.load(data, data_dir), order, seed)
        kind = LogisticRegression if model == "logistic" else Ridge
        problem = kind(dataset.features, dataset.targets, l2=l2, workers=workers)
        constants, (_, least) = problem.smoothness, problem.optimum
    entries = list(comparison.contestants(problem, compressor, k, value, p, schedule))
    if unknown := set(names) - {one.label for one in entries}:
        raise ConfigurationError(
            f"--method {', '.join(sorted(unknown))} is unknown; use {', '.join(one.label for one in entries)}"
        )
    entries = [one for one in entries if not names or one.label in names]

    outcomes = []
    columns = (
        *(TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn()),
        *(TextColumn("{task.fields[best]}"), TimeElapsedColumn()),
    )
    with Progress(*columns, console=console) as progress:
        for entry in entries:
            total = budget if entry.moves else 1
            task = progress.add_task(entry.label, total=total, best="")

            def watch(tried: int, best: comparison.Score, task: Any = task, entry: Any = entry) -> None:
                unit = "best gap" if best.missed else entry.aim
                progress.update(task, completed=tried, best=f"{unit} {best.cost:.3g}")

            outcome = comparison.compete(entry, problem, rounds, target, seed, budget, watch)
            progress.update(task, completed=total)
            outcomes.append(outcome)

    targets = sorted({*(one for one in TARGETS if one >= target), target}, reverse=True)
    runs = [one.record(least, targets, compressor, k) for one in outcomes]
    report = {
        "data": dataset.name, "model": model, "rows": problem.rows, "dimension": problem.dimension,
        "workers": workers, "order": order, "l2": l2, "value": value, "seed": seed,
        "schedule": schedule,
        "constants": {"L_f": constants.mean, "L_bar": constants.worker, "L": constants.row,
                      "mu": constants.strong, "kappa": constants.condition},
        "runs": runs,
    }  # fmt: skip
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    if plots is not None:
        from .reproduce_eclk_plots import draw

        stem = f"{dataset.name}-{compressor}-{k}"
        for path in draw(outcomes, least, plots, stem, f"{dataset.name}, {compressor} k={k}, l2={l2:g}"):
            console.print(f"wrote {path}")
    Console().print(table(runs, targets, problem))


def table(runs: Sequence[dict[str, Any]], targets: Sequence[float], problem: LinearModel) -> Table:
    """Rounds and bits of every method to the last target."""
    last = list(runs[0]["rounds_to"])[-1]
    kappa = problem.smoothness.condition
    title = f"to a relative gap of {last}: d = {problem.dimension}, kappa = {kappa:.3g}"
    made = Table(title=title, box=box.SIMPLE)
    for name in ("method", "rounds", "kbit per worker", "best gap", "runs tried"):
        made.add_column(name, justify="left" if name == "method" else "right")
    for run in runs:
        count, bits = run["rounds_to"][last], run["bits_per_worker_to"][last]
        made.add_row(
            run["method"],
            "-" if count is None else str(count),
            "-" if bits is None else f"{bits / 1000:.1f}",
            "diverged" if run["diverged"] else f"{run['best_gap']:.1e}",
            str(run["runs_tried"]),
        )
    return made
