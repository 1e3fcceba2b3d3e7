"""The tiny vector that rides Horovod's own allreduce, and what all ranks agree on through it.

Whatever the reduction is (average, sum, average with a pre-division), it acts on the constant
first element too, so that element tells how to scale an aggregate of ours to match.  The other
elements tell every rank the same about the whole job; anything that ranks must decide alike is
decided from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .backend import Array, Backend
from .numpy_backend import NUMPY

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
    """What a reduced ballot says: means over the ranks, float64 and boolean scalars, or plain numbers."""

    improvement: Any
    energy: Any
    fixed: Any
    variable: Any
    nonfinite: Any
    same_settings: Any
    same_members: Any


def read(b: Backend, reduced: Array, ranks: Sequence[int]) -> Tally:
    """Reads a reduced ballot (float32, ``SIZE`` elements or more) into scalar arrays.

    ``ranks``: those that the ballot ought to have come from.
    """
    count = len(ranks)
    mean = b.cast(reduced[:SIZE], "float64")
    mean = mean / mean[0]
    sums, squares = mean[_SETTINGS::2] * count, mean[_SETTINGS + 1 :: 2] * count
    # One rank whose digit differs by one raises this by count - 1; rounding by far less.
    spread = count * squares - sums * sums
    members = np.asarray(ranks, dtype=np.float64)
    expected = b.constant([float(members.mean()), float((members * members).mean())], "float64", reduced)
    distance = b.abs(mean[_MEMBERS:_SETTINGS] - expected)
    return Tally(
        *(mean[field] for field in range(2, _MEMBERS)),
        nonfinite=nonfinite(reduced),
        same_settings=b.max(spread) < max(0.5, 0.5 * (count - 1)),
        same_members=b.sum(b.cast(distance > 1e-8 + 1e-4 * expected, "int64")) == 0,
    )


def tally(reduced: np.ndarray[Any, Any], ranks: Sequence[int]) -> Tally:
    """As :func:`read`, on the host, with Python numbers."""
    found = read(NUMPY, reduced, ranks)
    return Tally(**{f.name: getattr(found, f.name).item() for f in dataclasses.fields(found)})
