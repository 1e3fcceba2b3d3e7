"""Run a method round by round: measure, stop, and never end in a silent NaN."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.errors import HvdAdaptiveError
from .method import Method
from .network import Network
from .problems import LinearModel


class DivergedError(HvdAdaptiveError, ArithmeticError):
    """A run diverged and was not allowed to go on with smaller steps."""


class DivergenceWarning(UserWarning):
    """A run diverged and went on, from its best point, with smaller steps."""


@dataclass
class History:
    """What was measured.  ``rounds``, ``bits`` (sent per worker so far, mean over workers) and
    ``objectives`` have one entry per measurement; the first is at round 0."""

    rounds: list[int] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)
    objectives: list[float] = field(default_factory=list)
    rescues: int = 0
    diverged: bool = False

    def gaps(self, least: float) -> np.ndarray:
        """Objective gaps over the first one, given the least objective."""
        first = self.objectives[0] - least
        return (np.array(self.objectives) - least) / (first if first > 0 else 1.0)

    def first_below(self, gap: float, least: float) -> tuple[int, float] | None:
        """(rounds, bits per worker) at the first measurement with a relative gap of at most ``gap``."""
        below = np.flatnonzero(self.gaps(least) <= gap)
        return (self.rounds[below[0]], self.bits[below[0]]) if below.size else None


@dataclass(frozen=True)
class Result:
    """``x``: the best measured point.  ``method``: with the parameters that it ended with."""

    x: np.ndarray
    history: History
    method: Method
    state: Any


def objective(problem: LinearModel, network: Network, x: np.ndarray) -> float:
    """P(x) over the rows of all workers; the same float on every worker."""
    return float(network.gather(problem.worker_losses(x)).sum()) + problem.regulariser(x)


def measure_after(rounds: int) -> int:
    """The rounds between measurements: 1 % of what was run, so that counts are within 1 %."""
    return max(1, rounds // 100)


def run(
    method: Method,
    problem: LinearModel,
    network: Network,
    rounds: int,
    x: np.ndarray | None = None,
    stop: Callable[[History], bool] = lambda history: False,
    rescue: bool = True,
    finished: Callable[[Any], bool] = lambda state: False,
) -> Result:
    """At most ``rounds`` rounds from ``x`` (zeros by default).

    stop: called after every measurement.
    finished: called with the state after every round; it must say the same on all workers.
    rescue: where the objective stops being finite or exceeds four times its value at the start,
        begin anew at the best point with halved steps (L1 doubled), with a
        :class:`DivergenceWarning`; False: end there with ``history.diverged``.

    Raises :class:`DivergedError` after 60 such new beginnings, and where the objective is not finite at
    ``x``, from which no smaller step leads away.
    """
    x = np.zeros(problem.dimension) if x is None else np.asarray(x, dtype=np.float64)
    history = History()
    with np.errstate(over="ignore", invalid="ignore"):
        state = method.start(problem, network, x)
        best = objective(problem, network, x)
        if not np.isfinite(best):
            raise DivergedError(f"the objective at the starting point is {best}; scale the data or the point")
        ceiling = 4.0 * best + 1e-300
        _record(history, 0, network, best)
        due = 1
        for count in range(1, rounds + 1):
            state = method.step(problem, network, state)
            done = finished(state)
            if count < due and count < rounds and not done:
                continue
            due = count + measure_after(count)
            answer = method.solution(state)
            value = objective(problem, network, answer)
            if not value <= ceiling:  # catches NaN too
                if not rescue:
                    history.diverged = True
                    break
                history.rescues += 1
                if history.rescues > 60:
                    raise DivergedError(
                        f"{method.name} diverges however small its steps; check the data's scale"
                    )
                method = method.cautious()
                warnings.warn(
                    f"{method.name} diverged at round {count}; it goes on from its best point with "
                    f"{_steps(method)}",
                    DivergenceWarning,
                    stacklevel=2,
                )
                state = method.start(problem, network, x)
                value = best
            elif value < best:
                x, best = answer, value
            _record(history, count, network, value)
            if done or stop(history):
                break
    return Result(x, history, method, state)


def _record(history: History, count: int, network: Network, value: float) -> None:
    history.rounds.append(count)
    history.bits.append(network.bits_per_worker)
    history.objectives.append(value)


def _steps(method: Method) -> str:
    for name in ("L1", "gamma", "smoothness"):
        if hasattr(method, name):
            return f"{name}={getattr(method, name):g}"
    return "smaller steps"
