"""The tiny vector that rides Horovod's own allreduce, and what all ranks agree on through it.

Whatever the reduction is (average, sum, average with a pre-division), it acts on the constant
first element too, so that element tells how to scale an aggregate of ours to match.  The other
elements tell every rank the same about the whole job; anything that ranks must decide alike is
decided from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .backend import Array, Backend

_DIGITS = 3
_BASE = 64  # squares of digits, summed over a thousand ranks, are whole numbers in float32

_MEMBERS = 6  # where the rank begins
_SETTINGS = 8  # where the digits begin

SIZE = _SETTINGS + 2 * _DIGITS
"""Elements of a ballot, float32."""


def make(
    b: Backend,
    like: Array,
    *,
    nonfinite: Any,
    improvement: Any,
    energy: Any,
    fixed: Any,
    variable: Any,
    rank: Any,
    fingerprint: int,
) -> Array:
    """This rank's ballot for one tensor and step: float32, ``SIZE`` elements.

    ``nonfinite`` boolean; ``improvement``: of what is sent, and ``energy``: of what could be, in
    squared gradient units; ``fixed`` and ``variable``: cost that does not and that does depend on
    how much is sent, in the cost model's unit; ``rank``: this one's, globally; ``fingerprint``: of
    the settings.
    """
    digits = [(fingerprint // _BASE**place) % _BASE for place in range(_DIGITS)]
    settings = [float(x) for digit in digits for x in (digit, digit * digit)]
    measured = (
        b.cast(x, "float32") for x in (nonfinite, improvement, energy, fixed, variable, rank, rank * rank)
    )
    return b.concat(
        [b.constant([1.0], "float32", like)]
        + [b.reshape(x, (1,)) for x in measured]
        + [b.constant(settings, "float32", like)]
    )


def scale(reduced: Array, world_size: int) -> Array:
    """What a sum over ranks must be multiplied by to be reduced as Horovod reduces."""
    return reduced[0] / world_size


def nonfinite(reduced: Array) -> Array:
    """Whether any rank's gradient was not finite: a boolean scalar."""
    return reduced[1] > 0


@dataclass(frozen=True)
class Tally:
    """A reduced ballot as Python numbers; means over the ranks."""

    improvement: float
    energy: float
    fixed: float
    variable: float
    nonfinite: bool
    same_settings: bool
    same_members: bool

    @property
    def cost(self) -> float:
        """Of the step, for this tensor."""
        return self.fixed + self.variable


def tally(reduced: np.ndarray[Any, Any], ranks: Sequence[int]) -> Tally:
    """Reads a reduced ballot (float32, ``SIZE`` elements or more, on the host).

    ``ranks``: those that the ballot ought to have come from.
    """
    count = len(ranks)
    mean = reduced[:SIZE].astype(np.float64) / float(reduced[0])
    sums, squares = mean[_SETTINGS::2] * count, mean[_SETTINGS + 1 :: 2] * count
    # One rank whose digit differs by one raises this by count - 1; rounding by far less.
    spread = count * squares - sums * sums
    members = np.asarray(ranks, dtype=np.float64)
    expected = np.array([members.mean(), (members * members).mean()])
    return Tally(
        *(float(x) for x in mean[2:_MEMBERS]),
        nonfinite=bool(mean[1] > 0),
        same_settings=bool((spread < max(0.5, 0.5 * (count - 1))).all()),
        same_members=bool(np.allclose(mean[_MEMBERS:_SETTINGS], expected, rtol=1e-4)),
    )
