"""What the runs of ``benchmarks/network`` came to: reading their JSON, and summing it up.

A run of the kind ``train`` holds a loss curve with its seconds; one of the kind ``pace`` holds the seconds
of some steps over a link.  The curve of a contestant whose choices do not depend on the link is the same
over every link, so there its time is the steps of the curve times the median step over the link.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import ConfigurationError

FORMAT = "hvd_adaptive network run 1"
SUMMARY_FORMAT = "hvd_adaptive network summary 1"
BASELINE = "dense"
PARTS = ("compute", "compress", "decompress", "communicate")

WINDOW = 3
"""Checks whose mean loss is compared with the target: one alone is noisy, and nobody shall win by luck."""

_NUMBER = (int, float)
_FIELDS: Mapping[str, Any] = {
    "kind": str,
    "task": str,
    "contestant": str,
    "label": str,
    "collective": str,
    "by_link": bool,
    "seed": int,
    "ranks": int,
    "target": _NUMBER,
}
_RESULTS: Mapping[str, Any] = {
    "parameters": int,
    "steps": int,
    "setup_seconds": _NUMBER,
    "step_seconds": list,
    "parts": dict,
}

Run = Mapping[str, Any]


def run_name(run: Run) -> str:
    """The name of a run's file."""
    rate = rate_name(run["rate"]).replace(" ", "").replace("/", "")
    kind, seed, ranks = run["kind"], run["seed"], run["ranks"]
    return f"{kind}-{run['task']}-{ranks}ranks-{rate}-{run['contestant']}-seed{seed}.json"


def rate_name(rate: float | None) -> str:
    """A link's rate in bits per second, in words."""
    if rate is None:
        return "unlimited"
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def read(folder: Path) -> list[Run]:
    """The runs in ``folder/runs``, in the order of their names.

    Raises ConfigurationError where there are none, or where a file is something else.
    """
    inner = folder / "runs"
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is not a directory; give the one that run.py --out wrote")
    paths = sorted(inner.glob("*.json"))
    if not paths:
        raise ConfigurationError(
            f"{folder} has no runs/*.json; make some with: "
            f"sudo python benchmarks/network/run.py --out {folder}"
        )
    return [_checked(path) for path in paths]


def _checked(path: Path) -> Run:
    try:
        run = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as JSON ({error}); remove it") from error
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        raise ConfigurationError(f"{path} is not a run of the network benchmark ({FORMAT!r}); remove it")
    wanted = dict(_FIELDS) if "failed" in run else {**_FIELDS, **_RESULTS}
    if "failed" not in run and run.get("kind") == "train":
        wanted["checks"] = list
    for name, kind in wanted.items():
        value = run.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigurationError(f"{path}: {name!r} is {value!r}; the file is damaged, so remove it")
    rate = run.get("rate")
    if rate is not None and not (isinstance(rate, _NUMBER) and rate > 0):
        raise ConfigurationError(f"{path}: 'rate' is {rate!r}; the file is damaged, so remove it")
    return run


@dataclass(frozen=True)
class Point:
    """Where a run reached its target, interpolated between two checks.  ``steps`` counts from the second,
    as the clock does; ``seconds``, ``bits`` (sent by a rank) and ``payload`` (handed to collectives)."""

    steps: float
    seconds: float
    bits: float
    payload: float


def smoothed(checks: Sequence[Mapping[str, float]]) -> list[float]:
    """The mean held-out loss of the last ``WINDOW`` checks, at every check."""
    losses = [check["loss"] for check in checks]
    return [statistics.fmean(losses[max(0, end - WINDOW) : end]) for end in range(1, len(losses) + 1)]


def reached(run: Run) -> Point | None:
    """Where the smoothed held-out loss first fell to the target; None if it never did."""
    checks, target = run["checks"], run["target"]
    losses = smoothed(checks)
    for at, loss in enumerate(losses):
        if loss > target:
            continue
        before, share = max(0, at - 1), 1.0
        if at > 0:
            share = (losses[before] - target) / (losses[before] - loss)

        def between(name: str, a: Any = checks[before], b: Any = checks[at], share: float = share) -> float:
            return float(a[name] + share * (b[name] - a[name]))

        return Point(between("step") - 1, between("seconds"), between("bits"), between("payload"))
    return None


@dataclass(frozen=True)
class Course:
    """A loss curve over a link: ``checks`` with the seconds and bits there, and how they were found.

    ``trained``: measured over this very link; else steps are timed with the run ``pace``.
    """

    run: Run
    pace: Run | None

    @property
    def trained(self) -> bool:
        return self.pace is None

    @property
    def step_seconds(self) -> float:
        """Median of a step."""
        return float(statistics.median((self.pace or self.run)["step_seconds"]))

    def checks(self) -> list[tuple[float, float, float]]:
        """(seconds, bits sent by a rank, held-out loss) at every check."""
        found = []
        for check in self.run["checks"]:
            seconds, bits = check["seconds"], check["bits"]
            if self.pace is not None:
                seconds = (check["step"] - 1) * self.step_seconds
                bits = (check["step"] - 1) * self.pace["bits_per_step"]
            found.append((float(seconds), float(bits), float(check["loss"])))
        return found

    def reached(self) -> Point | None:
        """Where the target was reached, in this link's seconds and bits."""
        point = reached(self.run)
        if point is None or self.pace is None:
            return point
        seconds, bits = point.steps * self.step_seconds, point.steps * self.pace["bits_per_step"]
        return Point(point.steps, seconds, bits, point.payload)

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds of a step's parts, means."""
        parts: Mapping[str, float] = (self.pace or self.run)["parts"]
        return parts


Cell = tuple[str, int, float | None, str]
"""Task, ranks, rate and contestant."""


def courses(runs: Iterable[Run]) -> dict[Cell, list[Course]]:
    """The curves of every task, number of ranks, rate and contestant, a course for each seed."""
    good = [run for run in runs if "failed" not in run]
    trained: dict[tuple[str, int, str], list[Run]] = defaultdict(list)
    pace: dict[Cell, Run] = {}
    found: dict[Cell, list[Course]] = defaultdict(list)
    for run in good:
        if run["kind"] == "pace":
            pace[run["task"], run["ranks"], run["rate"], run["contestant"]] = run
        else:
            trained[run["task"], run["ranks"], run["contestant"]].append(run)
            found[run["task"], run["ranks"], run["rate"], run["contestant"]].append(Course(run, None))
    for cell, one in pace.items():
        task, ranks, _, name = cell
        if cell in found or one["by_link"]:
            continue
        by_seed = {run["seed"]: run for run in trained[task, ranks, name]}
        found[cell] = [Course(run, one) for _, run in sorted(by_seed.items())]
    return {cell: sorted(list_, key=lambda c: int(c.run["seed"])) for cell, list_ in found.items() if list_}


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """``{"format", "cells": [...]}``, a cell for each task, number of ranks, rate and contestant.

    ``quotient``: how many times as long dense takes to the target, of the median times, and the least and
    greatest over the seeds (each against dense of the same seed).  Of a run that never got there the seconds
    are null, and so is the quotient where there is no median.
    """
    found = courses(runs)
    cells = []
    for cell, own in found.items():
        task, ranks, rate, name = cell
        points = {course.run["seed"]: course.reached() for course in own}
        dense = {c.run["seed"]: c.reached() for c in found.get((task, ranks, rate, BASELINE), [])}
        seconds = _of(points.values(), "seconds")
        pairs = [
            other.seconds / point.seconds
            for seed, point in points.items()
            if point is not None and (other := dense.get(seed)) is not None
        ]
        own_median, dense_median = (
            median(seconds),
            median(_of(dense.values(), "seconds")),
        )
        quotient = dense_median / own_median if own_median and dense_median else None
        bits = _of(points.values(), "bits")
        cells.append(
            {
                "task": task,
                "ranks": ranks,
                "rate": rate,
                "contestant": name,
                "label": own[0].run["label"],
                "target": own[0].run["target"],
                "trained_here": own[0].trained,
                "seeds": list(points),
                "seconds": seconds,
                "seconds_median": own_median,
                "quotient": quotient,
                "quotient_range": [min(pairs), max(pairs)] if pairs else None,
                "steps": [None if point is None else point.steps + 1 for point in points.values()],
                "bits_per_rank": bits,
                "bits_per_rank_median": median(bits),
                "last_loss": [course.run["checks"][-1]["loss"] for course in own],
                "step_seconds": statistics.median(course.step_seconds for course in own),
                "setup_seconds": statistics.median((c.pace or c.run)["setup_seconds"] for c in own),
                "parts": {part: statistics.median(c.parts[part] for c in own) for part in PARTS},
                "reasons": [course.run["reason"] for course in own if course.run.get("reason")],
            }
        )
    failed = {(run["contestant"], run["label"], run["failed"]) for run in runs if "failed" in run}
    return {
        "format": SUMMARY_FORMAT,
        "cells": cells,
        "cores": sorted({run["cores"] for run in runs if isinstance(run.get("cores"), int)}),
        "failed": [{"contestant": a, "label": b, "failed": c} for a, b, c in sorted(failed)],
    }


def _of(points: Iterable[Point | None], name: str) -> list[float | None]:
    return [None if point is None else float(getattr(point, name)) for point in points]


def median(values: Sequence[float | None]) -> float | None:
    """Of the seeds, where those that never got there count as infinitely long; None if it is infinite."""
    if not values:
        return None
    value = statistics.median(float("inf") if one is None else one for one in values)
    return None if value == float("inf") else value
