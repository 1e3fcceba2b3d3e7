"""``hvd-adaptive simulate``: how a recipe would train over a link, without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..core.cost import LinkTime, PayloadBits
from ..core.errors import ConfigurationError
from ..core.recipe import RECIPES, build

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.option("--task", "task_name", default="mlp", show_default=True, help="mlp (digits) or language.")
@click.option("--recipe", "recipes", multiple=True, default=("none", "topk", "adaptive"), show_default=True)
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Of every recipe that has it.")
@click.option("--workers", default=4, show_default=True, type=click.IntRange(2, 1024))
@click.option("--steps", default=300, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
@click.option("--bandwidth", default=1e8, show_default=True, help="Of a worker's link, in bits per second.")
@click.option("--latency", default=1e-4, show_default=True, help="Of one hop, in seconds.")
@click.option("--compute", default=0.02, show_default=True, help="Seconds of a step without communication.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write every step."
)
@click.option("--plot", type=_FILE, help="Draw loss against time (PNG).")
def simulate(
    task_name: str,
    recipes: tuple[str, ...],
    options: tuple[str, ...],
    workers: int,
    steps: int,
    seed: int,
    bandwidth: float,
    latency: float,
    compute: float,
    json_path: Path | None,
    plot: Path | None,
) -> None:
    """Train by simulated workers: real gradients, the messages of a real run, modelled time."""
    from ..simulation.run import Trace, step_time, train
    from ..simulation.tasks import task

    link = LinkTime(PayloadBits(1), bandwidth, latency, compute, workers)
    chosen, given = task(task_name), dict(_option(text) for text in options)
    console, runs = Console(), []
    columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        for name in recipes:
            recipe = build(name, _options(name, given, link))
            bar = progress.add_task(name, total=steps)
            trace = Trace()
            for trace in train(chosen, recipe, workers=workers, steps=steps, seed=seed):  # noqa: B007
                progress.advance(bar)
            seconds = [step_time(link, b, d) for b, d in zip(trace.wire, trace.dense, strict=True)]
            runs.append({"recipe": name, "seconds_per_step": seconds, **vars(trace)})
    console.print(_table(task_name, workers, link, runs))
    if json_path is not None:
        settings = {"task": task_name, "workers": workers, "bandwidth": bandwidth, "latency": latency}
        document = {**settings, "compute": compute, "seed": seed, "runs": runs}
        json_path.write_text(json.dumps(document, indent=1))
    if plot is not None:
        _draw(plot, task_name, runs)


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(f"--option wants NAME=VALUE, such as ratio=0.01, not {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _options(name: str, given: dict[str, Any], link: LinkTime) -> dict[str, Any]:
    """Those of ``given`` that the recipe has; the link is what an adaptive one goes by."""
    import inspect

    if name not in RECIPES:
        return {}
    known = inspect.signature(RECIPES[name]).parameters
    own = {key: value for key, value in given.items() if key in known}
    return {"cost": link, **own} if "cost" in known else own


def _table(task_name: str, workers: int, link: LinkTime, runs: list[dict[str, Any]]) -> Table:
    title = f"{task_name}, {workers} workers, {link.bandwidth / 1e6:g} Mbit/s, {link.compute:g} s a step"
    table = Table(title=title)
    for column in ("recipe", "loss", "Mbit received", "of it a step", "seconds", "communication"):
        table.add_column(column, justify="left" if column == "recipe" else "right")
    for run in runs:
        total, bits = sum(run["seconds_per_step"]), sum(run["bits"])
        steps = len(run["bits"])
        loss = run["checked"][-1][1] if run["checked"] else run["train_loss"][-1]
        share = 1 - link.compute * steps / total
        table.add_row(
            run["recipe"],
            f"{loss:.4f}",
            f"{bits / 1e6:.1f}",
            f"{bits / 1e6 / steps:.3f}",
            f"{total:.2f}",
            f"{share:.0%}",
        )
    return table


def _draw(path: Path, task_name: str, runs: list[dict[str, Any]]) -> None:
    import itertools

    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        times = list(itertools.accumulate(run["seconds_per_step"]))
        axes.plot([times[step - 1] for step, _ in run["checked"]], [loss for _, loss in run["checked"]])
    axes.legend([run["recipe"] for run in runs])
    axes.set(title=task_name, xlabel="modelled seconds", ylabel="held-out loss", xscale="log")
    figure.savefig(path, dpi=120)
