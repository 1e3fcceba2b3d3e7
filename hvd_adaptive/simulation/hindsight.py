"""Adaptive, without a setting, against the best fixed ratio that hindsight could have chosen."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..core.recipe import Recipe, adaptive, none, topk
from .run import Trace, link_of_ratio, train
from .tasks import Task, task

FIXED = tuple(10 ** (-half / 2) for half in range(1, 9))
"""Half decades from 10**-0.5 to 10**-4; dense is tried too."""


def run(
    json_path: str,
    tasks: Sequence[str],
    seeds: int,
    workers: int,
    steps: int,
    target: float | None,
    ratios: Sequence[float],
) -> None:
    """Trains everything, prints a table and writes ``{"tasks": [...]}``; times are medians over seeds,
    in units of a step's computation."""
    rows = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        for name in tasks:
            chosen = task(name)
            if target is not None:
                chosen = dataclasses.replace(chosen, target=target)
            bar = progress.add_task(name, total=seeds * (1 + len(FIXED) + 2 * len(ratios)))
            rows += _of_task(chosen, seeds, workers, steps, ratios, lambda bar=bar: progress.advance(bar))
    document = {"workers": workers, "seeds": seeds, "steps": steps, "tasks": rows}
    Path(json_path).write_text(json.dumps(document, indent=1))
    Console().print(_table(rows))


def _of_task(
    chosen: Task, seeds: int, workers: int, steps: int, ratios: Sequence[float], tick: Any
) -> list[dict[str, Any]]:
    dimension = sum(p.numel() for p in chosen.model().parameters())
    links = {r: link_of_ratio(r, dimension, workers) for r in ratios}

    def times(recipe: Recipe, among: Sequence[float]) -> dict[float, list[float | None]]:
        found: dict[float, list[float | None]] = {r: [] for r in among}
        for seed in range(seeds):
            trace = Trace()
            for trace in train(chosen, recipe, workers=workers, steps=steps, seed=seed, until=chosen.target):  # noqa: B007
                pass
            for r in among:
                found[r].append(trace.time_to(chosen.target, links[r]))
            tick()
        return found

    # What a fixed ratio does is the same over every link, so one run serves all.
    fixed = {1.0: times(none(), ratios), **{q: times(topk(q), ratios) for q in FIXED}}
    rows = []
    for r in ratios:
        best = min(fixed, key=lambda q: _median(fixed[q][r]))
        own = times(adaptive(cost=links[r]), [r])[r]
        share = times(adaptive(cost=links[r], values="fp32", share=0.1), [r])[r]
        ours, hindsight, constant = _median(own), _median(fixed[best][r]), _median(share)
        rows.append(
            {
                "task": chosen.name,
                "r": r,
                "best_fixed_ratio": best,
                "best_fixed_time": hindsight,
                "share_time": constant,
                "adaptive_time": ours,
                "quotient": ours / min(hindsight, constant),
                "fixed_times": {str(q): fixed[q][r] for q in fixed},
                "adaptive_times": own,
                "share_times": share,
            }
        )
    return rows


def _median(times: Sequence[float | None]) -> float:
    """Of the seeds; a run that never got there counts as infinitely long."""
    return statistics.median(float("inf") if t is None else t for t in times)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="time to the target loss, in steps' computations")
    for column in ("task", "r", "best fixed ratio", "its time", "a tenth", "adaptive", "quotient"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for row in rows:
        table.add_row(
            row["task"],
            f"{row['r']:g}",
            f"{row['best_fixed_ratio']:.2g}",
            f"{row['best_fixed_time']:.0f}",
            f"{row['share_time']:.0f}",
            f"{row['adaptive_time']:.0f}",
            f"{row['quotient']:.3f}",
        )
    return table
