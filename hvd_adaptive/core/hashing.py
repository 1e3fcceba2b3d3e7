"""Deterministic integer hashing: shared randomness and checksums, equal on every backend.

All arithmetic is on int64 arrays, modulo 2**64, so NumPy, torch and TensorFlow, on any device,
give the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import kernels
from .backend import Array, Backend

MASK32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def mix(b: Backend, x: Array) -> Array:
    """A bijection of int64 in which every bit of ``x`` affects every bit of the result.

    The finaliser of SplitMix64 (Steele, Lea and Flood 2014).  ``x``: int64, one-dimensional.
    """
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        x = b.xor(x, _logical_shift(b, x, shift)) * multiplier
    return b.xor(x, _logical_shift(b, x, 31))


def integers(b: Backend, like: Array, seed: int, step: Any, count: Any) -> Array:
    """``count`` pseudo-random int64 in ``0 .. 2**63 - 1``, a function of ``seed`` and ``step`` alone.

    Two calls that differ in seed or step are independent for all practical purposes, and the
    first n of m > n numbers are those of a call for n.  ``step``: a number or an int64 scalar.
    """
    return mix(b, b.arange(count, like) * _GOLDEN + key(b, like, seed, step)) & ((1 << 63) - 1)


def key(b: Backend, like: Array, seed: int, step: Any) -> Array:
    """What seed and step make of :func:`integers`: an int64 array of one element."""
    seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    return mix(b, mix(b, b.constant([seed], "int64", like)) + b.constant([step], "int64", like))


def uniform(b: Backend, like: Array, seed: int, step: Any, count: Any) -> Array:
    """As :func:`integers`, as float32 multiples of 2**-24 in [0, 1)."""
    return b.cast(b.shift_right(integers(b, like, seed, step, count), 39), "float32") * 2.0**-24


def checksum(b: Backend, words: Array) -> Array:
    """The checksum of ``words[1:]`` as an int32 array of one element, to be put at ``words[0]``.

    ``words``: int32, an even number of elements.  The hash is NH (Black et al., UMAC, 1999), a sum
    of products of 32-bit words that each had a key of its own position added, then mixed to 32
    bits: it finds any single wrong word but for about one chance in 2**32, and needs one
    multiplication per two words.
    """
    array = kernels.host(b, words)
    if array is not None:
        return b.from_host(
            np.array([kernels.checksum(array.view(np.uint32))], np.uint32).view(np.int32), words
        )
    odd, even = words[1::2], b.concat([words[2::2], words[:1] * 0])
    position = b.arange(b.length(odd), words) * 2
    left = (b.cast(odd, "int64") + (position + 1) * kernels.STRIDE) & MASK32
    right = (b.cast(even, "int64") + (position + 2) * kernels.STRIDE) & MASK32
    return b.cast(mix(b, b.reshape(b.sum(left * right), [1])) & MASK32, "int32")


def _logical_shift(b: Backend, x: Array, bits: int) -> Array:
    return b.shift_right(x, bits) & ((1 << (64 - bits)) - 1)
