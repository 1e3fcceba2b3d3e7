"""Which coordinates to send: supports by count, by threshold, or by a shared seed.

Every function returns the support as ascending int64 indices.  Coordinates equal to zero are
never chosen by magnitude: sending them would cost bits and improve nothing.
"""

from __future__ import annotations

from typing import Any

from . import hashing
from .backend import Array, Backend

SAMPLE = 1 << 14
"""Coordinates that a sampled threshold looks at.  The relative standard error of the count that
it lets through is about ``1 / sqrt(SAMPLE * ratio)``: 8 % at a ratio of 1 %."""


def above(b: Backend, x: Array, threshold: Array) -> Array:
    """Indices of the coordinates whose magnitude is at least ``threshold``, or, where there are
    none, of those of the largest magnitude: a tensor that is not zero always sends something.

    ``x``: float32, d > 0 elements.  ``threshold``: float32 scalar, not negative.
    """
    magnitude = b.abs(x)
    threshold = b.minimum(threshold, b.max(magnitude))
    return b.nonzero((magnitude >= threshold) & (magnitude > 0))


def largest(b: Backend, x: Array, count: Any) -> Array:
    """Indices of the ``count`` largest magnitudes, exactly; among equals the lowest index wins.

    ``count``: 1 .. d, a number or an integer scalar array.
    """
    magnitude = b.abs(x)
    threshold = b.kth_largest(magnitude, count)
    candidates = b.nonzero((magnitude >= threshold) & (magnitude > 0))
    chosen = b.take(magnitude, candidates)
    tie = chosen == threshold
    ties = b.cumsum(b.cast(tie, "int64"))
    greater = b.length(candidates) - b.sum(b.cast(tie, "int64"))
    kept = b.nonzero((chosen > threshold) | (ties <= b.cast(count - greater, "int64")))
    return b.take(candidates, kept)


def sample(b: Backend, x: Array) -> Array:
    """At most ``SAMPLE`` coordinates of ``x``: one drawn from each of as many equal strata.

    The draw depends on d alone, so it is the same on every rank and at every step.
    """
    dimension = int(x.shape[0])
    if dimension <= SAMPLE:
        return x
    return b.take(x, shared_random(b, x, dimension, SAMPLE, seed=dimension, step=0))


def sampled(b: Backend, x: Array, count: Any) -> Array:
    """About ``count`` of the largest magnitudes, by a threshold read off :func:`sample`."""
    drawn = b.abs(sample(b, x))
    dimension = int(x.shape[0])
    rank = (count * b.length(drawn) + dimension - 1) // dimension
    return above(b, x, b.kth_largest(drawn, rank))


def shared_random(b: Backend, like: Array, dimension: int, count: int, seed: int, step: Any) -> Array:
    """``count`` distinct coordinates of ``dimension``, the same on every rank, in no order.

    One coordinate is drawn from each of ``count`` strata of (nearly) equal size, and all are
    rotated by one random offset, so that each coordinate is chosen with probability exactly
    count / dimension: the contraction of rand-k (delta = k / d) at a cost of O(k).
    """
    strata = b.arange(count, like)
    start = strata * dimension // count
    size = (strata + 1) * dimension // count - start
    draws = hashing.integers(b, like, seed, step, count + 1)
    rotation = draws[count:] % dimension
    return (start + draws[:count] % size + rotation) % dimension
