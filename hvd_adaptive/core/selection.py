"""Which coordinates to send: supports by count, by threshold, or by a shared seed.

Every function returns the support as ascending int64 indices.  Coordinates equal to zero are
never chosen by magnitude: sending them would cost bits and improve nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from . import hashing, kernels, scan
from .backend import Array, Backend
from .numpy_backend import NUMPY

SAMPLE = 1 << 14
"""Coordinates that a sampled threshold looks at.  The relative standard error of the count that
it lets through is about ``1 / sqrt(SAMPLE * ratio)``: 8 % at a ratio of 1 %."""


def above(b: Backend, x: Array, threshold: Array) -> Array:
    """Indices of the coordinates whose magnitude is at least ``threshold``, or, where there are
    none, of those of the largest magnitude.

    ``x``: float32, d > 0 elements.  ``threshold``: float32 scalar, not negative.
    """
    return some(b, x, at_least(b, x, threshold))


def largest(b: Backend, x: Array, count: Any) -> Array:
    """Indices of the ``count`` largest magnitudes, exactly; among equals the lowest index wins.

    ``count``: 1 .. d, a number or an integer scalar array.
    """
    low = low_threshold(b, sample(b, x), int(x.shape[0]), count)
    return exactly(b, x, at_least(b, x, low), count)


def sampled(b: Backend, x: Array, count: Any) -> Array:
    """About ``count`` of the largest magnitudes, by a threshold read off :func:`sample`."""
    return above(b, x, near_threshold(b, sample(b, x), int(x.shape[0]), count))


def at_least(b: Backend, x: Array, threshold: Array) -> Array:
    """Indices of the coordinates whose magnitude is at least ``threshold`` and not zero."""
    host = kernels.host(b, x)
    if host is not None and host.dtype == np.float32:  # whose bits the compiled scan compares
        return b.from_host(scan.at_least(host, float(threshold)), x)
    magnitude = b.abs(x)
    return b.nonzero((magnitude >= threshold) & (magnitude > 0))


def low_threshold(b: Backend, drawn: Array, dimension: int, count: Any) -> Array:
    """A magnitude that, by the sample ``drawn`` of ``dimension`` coordinates, is all but certain to let
    ``count`` of them pass, and few more."""
    if dimension <= SAMPLE:
        return b.constant(0.0, "float32", drawn)
    expected = b.cast(b.constant(count, "float32", drawn), "float32") * (SAMPLE / dimension)
    rank = b.cast(expected + 4 * b.sqrt(expected) + 8, "int64")
    return b.kth_largest(b.abs(drawn), b.minimum(rank, b.constant(SAMPLE, "int64", drawn)))


def near_threshold(b: Backend, drawn: Array, dimension: int, count: Any) -> Array:
    """A magnitude that lets about ``count`` of ``dimension`` coordinates pass, by the sample ``drawn``."""
    return b.kth_largest(b.abs(drawn), (count * b.length(drawn) + dimension - 1) // dimension)


def exactly(b: Backend, x: Array, candidates: Array, count: Any) -> Array:
    """The ``count`` largest magnitudes, where the ``candidates`` are those above a low threshold; if it
    was too high after all, every coordinate is a candidate."""
    if int(x.shape[0]) <= SAMPLE:
        return _best(b, x, candidates, count)
    enough = b.constant(b.length(candidates), "int64", x) >= count
    return b.cond(
        enough,
        lambda: _best(b, x, candidates, count),
        lambda: _best(b, x, at_least(b, x, b.constant(0.0, "float32", x)), count),
    )


def some(b: Backend, x: Array, candidates: Array) -> Array:
    """The ``candidates``, or the coordinates of the largest magnitude where there are none: a tensor that
    is not zero always sends something."""
    any_ = b.constant(b.length(candidates), "int64", x) > 0
    return b.cond(any_, lambda: candidates, lambda: at_least(b, x, b.max(b.abs(x))))


def _best(b: Backend, x: Array, candidates: Array, count: Any) -> Array:
    """Those of ``candidates`` (ascending) with the ``count`` largest magnitudes; all if they are fewer."""
    host = kernels.host(b, x)
    if host is not None:
        return b.from_host(scan.best(host, np.asarray(kernels.host(b, candidates)), int(count)), x)
    magnitude = b.abs(b.take(x, candidates))
    size = b.constant(b.length(candidates), "int64", x)
    few = size <= b.cast(b.constant(count, "int64", x), "int64")

    def chosen() -> Array:
        threshold = b.kth_largest(magnitude, count)
        tie = b.cast(magnitude == threshold, "int64")
        room = b.cast(b.constant(count, "int64", x), "int64") - b.sum(b.cast(magnitude > threshold, "int64"))
        kept = b.nonzero((magnitude > threshold) | ((tie > 0) & (b.cumsum(tie) <= room)))
        return b.take(candidates, kept)

    return b.cond(few, lambda: candidates, chosen)


def sample(b: Backend, x: Array) -> Array:
    """At most ``SAMPLE`` coordinates of ``x``: one drawn from each of as many equal strata.

    The draw depends on d alone, so it is the same on every rank and at every step.
    """
    dimension = int(x.shape[0])
    if dimension <= SAMPLE:
        return x
    if kernels.host(b, x) is not None:
        return b.take(x, b.from_host(_drawn(dimension), x))
    return b.take(x, shared_random(b, x, dimension, SAMPLE, seed=dimension, step=0))


@lru_cache(maxsize=256)  # models have fewer sizes of tensors; one draw is 128 KiB
def _drawn(dimension: int) -> Any:
    like = np.zeros(0, np.float32)
    return shared_random(NUMPY, like, dimension, SAMPLE, seed=dimension, step=0)


def shared_random(b: Backend, like: Array, dimension: int, count: int, seed: int, step: Any) -> Array:
    """``count`` distinct coordinates of ``dimension``, the same on every rank, in no order.

    One coordinate is drawn from each of ``count`` strata of (nearly) equal size, and all are
    rotated by one random offset, so that each coordinate is chosen with probability exactly
    count / dimension: the contraction of rand-k (delta = k / d) at a cost of O(k).
    """
    if kernels.host(b, like) is not None and count:
        own = kernels.host(b, hashing.key(b, like, seed, step))
        assert own is not None
        found = np.empty(count, np.int64)
        kernels.draw_strata(own.view(np.uint64)[0], dimension, found)
        return b.from_host(found, like)
    strata = b.arange(count, like)
    start = strata * dimension // count
    size = (strata + 1) * dimension // count - start
    draws = hashing.integers(b, like, seed, step, count + 1)
    rotation = draws[count:] % dimension
    return (start + draws[:count] % size + rotation) % dimension
