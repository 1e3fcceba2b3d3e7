"""Tuning on a grid of powers of two, walked rather than scanned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .method import Method
from .network import Cluster
from .problems import LinearModel
from .run import History, Result, run

Settings = dict[str, float]
Aim = Literal["rounds", "bits"]


@dataclass(frozen=True)
class Score:
    """Smaller is better: first whether the target was met, then its cost, or else the best gap."""

    missed: bool
    cost: float

    def __lt__(self, other: Score) -> bool:
        return (self.missed, self.cost) < (other.missed, other.cost)


@dataclass(frozen=True)
class Tuned:
    """The best settings, their run, and how many were tried."""

    settings: Settings
    result: Result
    score: Score
    tried: int


def attempt(
    method: Method,
    problem: LinearModel,
    rounds: int,
    target: float,
    aim: Aim = "rounds",
    limit: float = np.inf,
    seed: int = 0,
) -> tuple[Result, Score]:
    """One run in a `Cluster` until the relative gap ``target``, ``rounds``, a cost of ``limit``, or a
    stall: a gap that the later half of the rounds lowered by less than a tenth."""
    least = problem.optimum[1]

    def cost(history: History) -> float:
        return history.rounds[-1] if aim == "rounds" else history.bits[-1]

    result = run(
        method,
        problem,
        Cluster(problem.workers, seed),
        rounds,
        stop=lambda history: (
            history.gaps(least)[-1] <= target or cost(history) > limit or _stalled(history, least)
        ),
        rescue=False,
    )
    if result.history.gaps(least)[-1] <= target:
        return result, Score(False, cost(result.history))
    if result.history.diverged:
        return result, Score(True, np.inf)
    return result, Score(True, float(result.history.gaps(least).min()))


def _stalled(history: History, least: float) -> bool:
    gaps, now = history.gaps(least), history.rounds[-1]
    half = int(np.searchsorted(history.rounds, now // 2))
    return now >= 500 and bool(gaps.min() > 0.9 * gaps[: half + 1].min())


def walk(
    build: Callable[[Settings], Method],
    start: Settings,
    moves: Mapping[str, Sequence[float]],
    problem: LinearModel,
    rounds: int,
    target: float,
    aim: Aim = "rounds",
    seed: int = 0,
    budget: int = 60,
    watch: Callable[[int, Score], None] = lambda tried, best: None,
) -> Tuned:
    """From ``start``, multiply one setting at a time by the factors of ``moves``; keep what is better.

    A factor that helps is tried again at once; the walk ends when no single move helps, or after
    ``budget`` runs.  Settings that ``build`` refuses are passed over.  A run is cut off where it
    costs more than the best so far.
    """
    settings = dict(start)
    result, best = attempt(build(settings), problem, rounds, target, aim, seed=seed)
    seen, tried = {_key(settings)}, 1
    improved = True
    while improved and tried < budget:
        improved = False
        for name, factors in moves.items():
            for factor in factors:
                while tried < budget:
                    candidate = {**settings, name: settings[name] * factor}
                    if _key(candidate) in seen:
                        break
                    seen.add(_key(candidate))
                    try:
                        method = build(candidate)
                    except ValueError:
                        break
                    limit = np.inf if best.missed else best.cost
                    found, score = attempt(method, problem, rounds, target, aim, limit, seed)
                    tried += 1
                    watch(tried, best)
                    if not score < best:
                        break
                    settings, result, best, improved = candidate, found, score, True
    return Tuned(settings, result, best, tried)


def _key(settings: Settings) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in settings.values())
