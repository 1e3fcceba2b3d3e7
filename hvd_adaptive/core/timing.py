"""How long a step computes, told from what the compressor itself sees of time."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

KEPT = 9  # an odd number of recent steps; their median shrugs off one that was interrupted


class StepClock:
    """Measures the seconds from the end of one step's reduction to the last gradient of the next,
    less those spent in compression: data loading, forward, backward and the optimizer's update."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._recent: deque[float] = deque(maxlen=KEPT)
        self._reduced: float | None = None
        self._latest: float | None = None
        self._duration = 0.0
        self._own = 0.0  # seconds in the calls before the latest

    @property
    def compute(self) -> float:
        """Median over recent steps, seconds; 0 before the second step."""
        return statistics.median(self._recent) if self._recent else 0.0

    def compressing(self, began: float, ended: float) -> None:
        """A call of ``compress``."""
        if self._latest is not None:
            self._own += self._duration
        self._latest, self._duration = began, ended - began

    def reduced(self) -> None:
        """All results of the step are in."""
        if self._reduced is not None and self._latest is not None:
            self._recent.append(max(0.0, self._latest - self._reduced - self._own))
        self._reduced, self._latest, self._own = self.now(), None, 0.0
