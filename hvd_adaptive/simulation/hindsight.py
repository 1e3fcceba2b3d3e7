"""Adaptive, without a setting, against the best fixed ratio that hindsight could have chosen."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..core.cost import LinkTime
from ..core.recipe import Recipe, adaptive, none, topk
from .run import Trace, link_of_ratio, train
from .tasks import Task, task

FIXED = tuple(10 ** (-half / 2) for half in (5, 4, 6, 3, 2, 1, 7, 8))
"""Half decades from 10**-0.5 to 10**-4, those that are likely to win first; dense is tried too."""

HOPELESS = 1.25
"""A fixed ratio that takes so many times as long as the best so far, over every link, has lost, and
its run is ended."""


class Runs:
    """Finished runs by all that they depend on but the code: in a file of JSON lines, where one is
    named, so that a comparison can be interrupted, or repeated with another recipe."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._found: dict[str, Trace] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                record = json.loads(line)
                self._found[record["run"]] = Trace(**record["trace"])

    def get(self, key: str) -> Trace | None:
        """The trace of that run, if it is known."""
        return self._found.get(key)

    def put(self, key: str, trace: Trace) -> None:
        """Remembers a run."""
        self._found[key] = trace
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"run": key, "trace": dataclasses.asdict(trace)}) + "\n")


def tenth(link: LinkTime) -> Recipe:
    """The constant share: communication takes a tenth of a step, float32 values are gathered."""
    return adaptive(cost=link, values="fp32", share=0.1, transport="allgather", rank=0)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One task: how it is trained, and over which links (by r) time is counted."""

    task: Task
    workers: int
    steps: int
    links: Mapping[float, LinkTime]
    runs: Runs

    def trace(self, recipe: Recipe, seed: int, best: Mapping[float, float] | None = None) -> Trace:
        """Trains until the target; or, where ``best`` gives the best time so far over each link, until
        the run is hopeless."""
        key = repr((self.task.name, self.task.target, self.workers, self.steps, seed, recipe))
        known = self.runs.get(key)
        if known is not None and (self._over(known) or self._hopeless(known, best)):
            return known
        trace = Trace()
        run = train(
            self.task, recipe, workers=self.workers, steps=self.steps, seed=seed, until=self.task.target
        )
        for trace in run:
            if trace.checked and trace.checked[-1][0] == len(trace.bits) and self._hopeless(trace, best):
                break
        self.runs.put(key, trace)
        return trace

    def time(self, trace: Trace, r: float) -> float | None:
        """Time to the target over the link of ``r``."""
        return trace.time_to(self.task.target, self.links[r])

    def _over(self, trace: Trace) -> bool:
        return len(trace.bits) >= self.steps or trace.steps_to(self.task.target) is not None

    def _hopeless(self, trace: Trace, best: Mapping[float, float] | None) -> bool:
        return best is not None and all(
            trace.elapsed(link) > HOPELESS * best[r] for r, link in self.links.items()
        )


def run(
    json_path: str,
    tasks: Sequence[str],
    seeds: int,
    workers: int,
    steps: int,
    target: float | None,
    ratios: Sequence[float],
    runs_path: str | None = None,
) -> None:
    """Trains everything, prints a table and writes ``{"tasks": [...]}``; times are medians over seeds,
    in units of a step's computation.  ``runs_path``: see :class:`Runs`."""
    rows, runs = [], Runs(runs_path)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        for name in tasks:
            chosen = task(name)
            if target is not None:
                chosen = dataclasses.replace(chosen, target=target)
            dimension = sum(p.numel() for p in chosen.model().parameters())
            links = {r: link_of_ratio(r, dimension, workers) for r in ratios}
            bar = progress.add_task(name, total=seeds * (1 + len(FIXED) + 2 * len(ratios)))
            comparison = Comparison(chosen, workers, steps, links, runs)
            rows += compare(comparison, range(seeds), lambda bar=bar: progress.advance(bar))
    document = {"workers": workers, "seeds": seeds, "steps": steps, "tasks": rows}
    Path(json_path).write_text(json.dumps(document, indent=1))
    Console().print(_table(rows))


def compare(comparison: Comparison, seeds: Sequence[int], tick: Any) -> list[dict[str, Any]]:
    """A row for each link.  ``tick()`` is called after every run."""
    links = comparison.links
    # What a fixed ratio does is the same over every link, so one run serves all.
    fixed: dict[float, dict[float, list[float | None]]] = {q: {r: [] for r in links} for q in (*FIXED, 1.0)}
    for seed in seeds:
        best = dict.fromkeys(links, float("inf"))
        for q, found in fixed.items():
            trace = comparison.trace(none() if q == 1.0 else topk(q), seed, best)
            for r in links:
                time = comparison.time(trace, r)
                found[r].append(time)
                best[r] = best[r] if time is None else min(best[r], time)
            tick()
    rows = []
    for r, link in links.items():
        own, share = (
            [comparison.trace(recipe, seed) for seed in seeds if not tick()]
            for recipe in (adaptive(cost=link), tenth(link))
        )
        winner = min(fixed, key=lambda q: median(fixed[q][r]))
        own_times, share_times = ([comparison.time(t, r) for t in traces] for traces in (own, share))
        ours, hindsight, constant = median(own_times), median(fixed[winner][r]), median(share_times)
        rows.append(
            {
                "task": comparison.task.name,
                "r": r,
                "best_fixed_ratio": winner,
                "best_fixed_time": hindsight,
                "share_time": constant,
                "adaptive_time": ours,
                "quotient": ours / min(hindsight, constant),
                "fixed_times": {str(q): fixed[q][r] for q in sorted(fixed)},
                "adaptive_times": own_times,
                "share_times": share_times,
                "adaptive_sparsity": [trace.sparsity for trace in own],
                "share_sparsity": [trace.sparsity for trace in share],
            }
        )
    return rows


def median(times: Sequence[float | None]) -> float:
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
