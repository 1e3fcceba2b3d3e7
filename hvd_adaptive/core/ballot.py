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

# A digit that differs on one rank moves the mean by 1 / n at least, which must stand out from the
# rounding of a float32 sum of n terms: small digits do, for thousands of ranks.
_BASE = 8
_DIGITS = 6

_MEMBERS = 9  # where the rank begins
_SETTINGS = 11  # where the digits begin

_PHASE = _SETTINGS + _DIGITS

SIZE = _PHASE + 1
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
    sparse_time: Any,
    dense_time: Any,
    alternative: Any,
    rank: Any,
    fingerprint: int,
    phase: Any,
) -> Array:
    """This rank's ballot for one tensor and step: float32, ``SIZE`` elements.

    ``nonfinite`` boolean; ``improvement``: of what is sent, and ``energy``: of what could be, in
    squared gradient units; ``fixed`` and ``variable``: cost that does not and that does depend on
    how much is sent, in the cost model's unit; ``sparse_time`` and ``dense_time``: seconds that a step
    of either kind takes on this rank, 0 where that is not known; ``alternative``: the improvement of the
    other form of a message, where one is being tried; ``rank``: this one's, globally;
    ``fingerprint``: of the settings; ``phase``: 0 to 7, where in the training this rank stands.
    """
    measured = (
        b.cast(x, "float32")
        for x in (
            *(nonfinite, improvement, energy, fixed, variable, sparse_time, dense_time, alternative),
            *(rank, rank * rank),
        )
    )
    return b.concat(
        [b.constant([1.0], "float32", like)]
        + [b.reshape(x, (1,)) for x in measured]
        + [b.constant(_digits(fingerprint), "float32", like)]
        + [b.reshape(b.cast(b.constant(phase, "float32", like), "float32"), (1,))]
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
    sparse_time: Any
    dense_time: Any
    alternative: Any
    nonfinite: Any
    same_settings: Any
    same_members: Any
    same_phase: Any


def read(b: Backend, reduced: Array, ranks: Sequence[int], fingerprint: int, phase: Any) -> Tally:
    """Reads a reduced ballot (float32, ``SIZE`` elements or more) into scalar arrays.

    ``ranks``: those that the ballot ought to have come from; ``fingerprint`` and ``phase``: this
    rank's.  Where two kinds of settings meet, every rank of either finds that they differ.
    """
    count = len(ranks)
    mean = b.cast(reduced[:SIZE], "float64")
    mean = mean / mean[0]
    own = b.constant(_digits(fingerprint), "float64", reduced)
    settings = b.max(b.abs(mean[_SETTINGS:_PHASE] - own))
    phases = b.abs(mean[_PHASE] - b.cast(b.constant(phase, "float64", reduced), "float64"))
    members = np.asarray(ranks, dtype=np.float64)
    expected = b.constant([float(members.mean()), float((members * members).mean())], "float64", reduced)
    distance = b.abs(mean[_MEMBERS:_SETTINGS] - expected)
    return Tally(
        improvement=mean[2],
        energy=mean[3],
        fixed=mean[4],
        variable=mean[5],
        sparse_time=mean[6],
        dense_time=mean[7],
        alternative=mean[8],
        nonfinite=nonfinite(reduced),
        same_settings=settings < 0.5 / count,
        same_members=b.sum(b.cast(distance > 1e-8 + 1e-4 * expected, "int64")) == 0,
        same_phase=phases < 0.5 / count,
    )


def tally(reduced: np.ndarray[Any, Any], ranks: Sequence[int], fingerprint: int, phase: int) -> Tally:
    """As :func:`read`, on the host, with Python numbers."""
    found = read(NUMPY, reduced, ranks, fingerprint, phase)
    return Tally(**{f.name: getattr(found, f.name).item() for f in dataclasses.fields(found)})


def _digits(fingerprint: int) -> list[float]:
    return [float(fingerprint // _BASE**place % _BASE) for place in range(_DIGITS)]
