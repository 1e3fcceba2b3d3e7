"""How long a step computes, told from what the compressor itself sees of time."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import numpy as np

from .backend import Array, Backend
from .numpy_backend import NUMPY

KEPT = 9  # an odd number of recent steps; their median shrugs off one that was interrupted

ENOUGH = 4
"""Steps of a kind, dense or sparse, of which a plain mean is taken, before it runs."""

SETTLED = 10
"""Sparse steps before the time that they take is told: the first ones are slower than those to come."""

FEW = 2
"""The same of dense ones, which may be far slower and then should not be many."""


class Wholes(NamedTuple):
    """What whole steps of either kind take lately: seconds and numbers of steps, and the kind of the last
    one (1: dense); float64 scalars."""

    sparse: Array
    dense: Array
    sparse_steps: Array
    dense_steps: Array
    kind: Array

    def told(self, b: Backend) -> tuple[Array, Array]:
        """Seconds of a sparse and of a dense step; 0 where it is not known."""
        return (
            b.where(self.sparse_steps >= SETTLED, self.sparse, 0.0),
            b.where(self.dense_steps >= FEW, self.dense, 0.0),
        )

    def after(self, b: Backend, seconds: Array, dense: Array) -> Wholes:
        """With one more step, ``dense`` (boolean) or not; no seconds: it was not measured.

        The first of a kind is not counted: it is timed from the middle of one of the other kind.
        """
        kind = b.cast(dense, "float64")
        counts = (seconds > 0) & (kind == self.kind)
        on, off = counts & dense, counts & (dense == False)  # noqa: E712
        return Wholes(
            b.where(off, _smoothed(b, self.sparse, self.sparse_steps, seconds), self.sparse),
            b.where(on, _smoothed(b, self.dense, self.dense_steps, seconds), self.dense),
            self.sparse_steps + b.cast(off, "float64"),
            self.dense_steps + b.cast(on, "float64"),
            kind,
        )


def _smoothed(b: Backend, mean: Array, steps: Array, newest: Array) -> Array:
    """A mean of so many steps with one more.  Later it runs: one long interruption moves it little; a fall
    to less than half is taken at once, since then the old ones were no rule."""
    near = mean + 0.2 * (b.minimum(newest, 2 * mean) - mean)
    running = b.where(newest > 0.5 * mean, near, newest)
    return b.where(steps >= ENOUGH, running, mean + (newest - mean) / (steps + 1))


class StepClock:
    """Measures the seconds from the end of one step's reduction to the last gradient of the next,
    less those spent in compression: data loading, forward, backward and the optimizer's update."""

    watch: ClassVar[Callable[[StepClock], None] | None] = None
    """Told after every step of any clock, where somebody wants to know."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._recent: deque[float] = deque(maxlen=KEPT)
        self._reduced: float | None = None
        self._latest: float | None = None
        self._duration = 0.0
        self._own = 0.0  # seconds in the calls before the latest
        self._began: float | None = None  # when the first result of the last step was in
        self._wholes = Wholes(*np.zeros(len(Wholes._fields)))
        self._known: tuple[float, float, float] | None = None  # what the properties say, between two steps

    @property
    def steps(self) -> int:
        """Recent steps that were measured; at most ``KEPT``."""
        return len(self._recent)

    @property
    def compute(self) -> float:
        """Median over recent steps, seconds; 0 before the second step."""
        return self._told()[0]

    @property
    def wholes(self) -> tuple[float, float]:
        """Seconds from end to end of a sparse and of a dense step; 0 where it is not known."""
        return self._told()[1:]

    def _told(self) -> tuple[float, float, float]:
        if self._known is None:
            sparse, dense = self._wholes.told(NUMPY)
            compute = statistics.median(self._recent) if self._recent else 0.0
            self._known = compute, float(sparse), float(dense)
        return self._known

    def compressing(self, began: float, ended: float) -> None:
        """A call of ``compress``."""
        if self._latest is not None:
            self._own += self._duration
        self._latest, self._duration = began, ended - began

    def reduced(self, dense: bool = False) -> None:
        """All results of a step are in."""
        now = self.now()
        if self._latest is not None:  # the first result of the step
            self._known = None
            if self._reduced is not None:
                self._recent.append(max(0.0, self._latest - self._reduced - self._own))
            if self._began is not None:
                whole = np.float64(now - self._began)
                self._wholes = self._wholes.after(NUMPY, whole, np.bool_(dense))
            self._began = now
            if StepClock.watch is not None:
                StepClock.watch(self)
        self._reduced, self._latest, self._own = now, None, 0.0
