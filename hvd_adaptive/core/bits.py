"""Bits in int32 words, and ascending indices in as few of them as their entropy allows.

Indices are sent as the gaps between them.  A gap is a quotient, in unary, and a remainder, in
binary; all quotients form one plane of bits and all remainders another, so that both are packed
and unpacked without a loop over coordinates.  Two codes share this form:

``RICE``   gap = quotient << width | remainder, remainders of ``width`` bits.  Within about 0.1 bit
           of the entropy for supports without structure (Rice 1979; Golomb 1966), and never worse
           than Elias-Fano of the same width; of width 0 it is a bitmap.
``GOLOMB`` exponential Golomb code (Teuhola 1978): gap = (2**quotient - 1) << width | remainder, with
           remainders of ``width + quotient`` bits.  Much shorter where indices come in clusters
           (rows of an embedding, filters), whose gaps are mostly small and sometimes huge.

The encoder picks by the size that a sample of the gaps would take.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import hashing, kernels
from .backend import Array, Backend

MASK32 = hashing.MASK32
RICE, GOLOMB, DENSE = kernels.RICE, kernels.GOLOMB, 2
MAX_WIDTH = 31
_NOT_ASCENDING = "indices must ascend strictly within 0 .. {}"
_WRONG_COUNT = "the message is corrupt (it holds another count of indices than it states)"
_WRONG_SIZE = "the message is corrupt (the planes of its indices do not fit together)"
_BEYOND = "the message is corrupt (an index is beyond the dimension)"
_FLAWS = {
    kernels.SOUND: "",
    kernels.WRONG_COUNT: _WRONG_COUNT,
    kernels.WRONG_SIZE: _WRONG_SIZE,
    kernels.BEYOND: _BEYOND,
}


class Planes(NamedTuple):
    """An encoded support: ``code`` and ``width`` are scalars, ``low`` and ``unary`` int32 words."""

    code: Any
    width: Any
    low: Array
    unary: Array


def words_for(bits: Any) -> Any:
    """The number of 32-bit words that hold ``bits`` bits."""
    return (bits + 31) // 32


def to_words(b: Backend, x: Array) -> Array:
    """int64 in 0 .. 2**32 - 1 as int32 words of the same bits."""
    return b.cast(x - (b.shift_right(x, 31) & 1) * (1 << 32), "int32")


def from_words(b: Backend, words: Array) -> Array:
    """int32 words as int64 in 0 .. 2**32 - 1."""
    return b.cast(words, "int64") & MASK32


def pack(b: Backend, codes: Array, offsets: Array, words: Any) -> Array:
    """Put the bits of ``codes`` (int64, each below 2**31) at bit ``offsets`` of ``words`` int32 words.

    The codes must not overlap; bit 0 is the least significant one of word 0.
    """
    placed = b.shift_left(codes, offsets & 31)
    at = b.shift_right(offsets, 5)
    out = b.zeros(words + 2, "int64", codes)  # codes of no bits may lie at the end
    out = b.scatter_add_(out, at, placed & MASK32)
    out = b.scatter_add_(out, at + 1, b.shift_right(placed, 32))
    return to_words(b, out[:words])


def unpack(b: Backend, words: Array, offsets: Array, masks: Any) -> Array:
    """The bits at ``offsets``, as int64, under ``masks`` (at most 31 bits): undoes :func:`pack`."""
    padded = b.concat([words, b.zeros(2, "int32", words)])
    at = b.shift_right(offsets, 5)
    first = from_words(b, b.take(padded, at))
    second = b.cast(b.take(padded, at + 1), "int64")
    both = b.shift_left(second, 32) | first
    return b.shift_right(both, offsets & 31) & masks


def ones(b: Backend, words: Array) -> Array:
    """The positions of the bits that are set, ascending, int64."""
    bits = b.shift_right(b.reshape(words, [-1, 1]), b.cast(b.arange(32, words), "int32")) & 1
    return b.nonzero(b.reshape(bits, [-1]) > 0)


def encode_indices(b: Backend, indices: Array, dimension: int) -> Planes:
    """Strictly ascending ``indices`` (int64, in 0 .. dimension - 1) as bit planes.

    Raises MessageError where they do not ascend or leave that range.
    """
    array = kernels.host(b, indices)
    if array is not None:
        return _encode_on_host(b, indices, array, dimension)
    count = b.length(indices)
    gaps = indices - b.concat([b.constant([-1], "int64", indices), indices])[:count] - 1
    outside = b.sum(b.cast((gaps < 0) | (indices >= dimension), "int64"))
    gaps = b.check(outside == 0, _NOT_ASCENDING.format(dimension - 1), gaps)
    code, width = _choose(b, gaps, dimension, count)
    quotients = b.cond(
        code == RICE,
        lambda: b.shift_right(gaps, width),
        lambda: bit_length(b, b.shift_right(gaps, width) + 1) - 1,
    )
    bases, widths = _bases(b, quotients, code, width)
    low_ends, ends = b.cumsum(widths), b.cumsum(quotients + 1)
    low_bits, unary_bits = b.items(b.constant([b.sum(widths), b.sum(quotients + 1)], "int64", indices), 2)
    low = pack(b, gaps - bases, low_ends - widths, words_for(low_bits))
    unary = pack(b, ends * 0 + 1, ends - 1, words_for(unary_bits))
    return Planes(code, width, low, unary)


def decode_indices(b: Backend, planes: Planes, count: Any, dimension: int) -> Array:
    """The ``count`` indices of ``planes``: int64, strictly ascending, all below ``dimension``.

    Raises MessageError where the planes cannot have come from :func:`encode_indices`.  ``code`` must
    be one of the two and ``width`` within ``0 .. MAX_WIDTH``.
    """
    code, width, low, unary = planes
    low_array, unary_array = kernels.host(b, low), kernels.host(b, unary)
    if low_array is not None and unary_array is not None:
        out = np.empty(count, np.int64)
        flaw = kernels.read_indices(
            low_array.view(np.uint32), unary_array.view(np.uint32), code, width, dimension, out
        )
        return b.check(flaw == kernels.SOUND, _FLAWS[flaw], b.from_host(out, low))
    positions = ones(b, unary)
    positions = b.check(b.length(positions) == count, _WRONG_COUNT, positions)
    before = b.concat([b.constant([-1], "int64", positions), positions])[: b.length(positions)]
    quotients = positions - before - 1
    # With larger quotients a gap would exceed the dimension, and sums of gaps could leave int64.
    most = b.cond(
        code == RICE,
        lambda: b.shift_right(b.constant([dimension], "int64", positions), width),
        lambda: b.constant([MAX_WIDTH], "int64", positions) - width,
    )
    within = _maximum(b, quotients, 0) <= b.sum(most)
    quotients = b.check(within, _BEYOND, quotients)
    bases, widths = _bases(b, quotients, code, width)
    widths = b.check(words_for(b.sum(widths)) == b.length(low), _WRONG_SIZE, widths)
    masks = b.shift_left(widths * 0 + 1, widths) - 1
    gaps = bases + unpack(b, low, b.cumsum(widths) - widths, masks)
    indices = b.cumsum(gaps + 1) - 1
    return b.check(_maximum(b, indices, -1) < dimension, _BEYOND, indices)


def smaller(b: Backend, x: Any, y: int) -> Any:
    """The smaller of two lengths."""
    return min(x, y) if isinstance(x, int) else b.minimum(x, b.constant(y, "int64", x))


def larger(b: Backend, x: Any, y: int) -> Any:
    """The larger of two lengths."""
    return max(x, y) if isinstance(x, int) else b.where(x > y, x, y)


def bit_length(b: Backend, x: Array) -> Array:
    """The number of bits of 1 <= x < 2**53: the exponent of the float64 of equal value."""
    return b.shift_right(b.bitcast(b.cast(x, "float64"), "int64"), 52) - 1022


def rice_width(b: Backend, dimension: int, count: Any) -> Any:
    """The best number of remainder bits for ``count`` indices drawn at random below ``dimension``.

    The gaps are geometric with mean m = dimension / count; from width w to w + 1 the expected length
    falls while exp(-2**w / m) > (sqrt(5) - 1) / 2, that is while 2**w < 0.481 m (Gallager and
    van Voorhis 1975); 13 / 27 = 0.4815.
    """
    ratio = 13 * dimension // (27 * count + 1)
    if isinstance(ratio, int):
        return min(ratio.bit_length(), MAX_WIDTH)
    return smaller(b, bit_length(b, 2 * ratio + 1) - 1, MAX_WIDTH)


def _encode_on_host(b: Backend, like: Array, indices: np.ndarray[Any, Any], dimension: int) -> Planes:
    """:func:`encode_indices` by compiled loops."""
    code, width = RICE, rice_width(b, dimension, len(indices))
    if dimension < 1 << 31:
        code, width = kernels.choose_code(indices, width)
    unary_bits, low_bits = kernels.measure_indices(indices, dimension, code, width)
    b.check(unary_bits >= 0, _NOT_ASCENDING.format(dimension - 1), like)
    low, unary = np.zeros(words_for(low_bits), np.uint32), np.zeros(words_for(unary_bits), np.uint32)
    kernels.write_indices(indices, code, width, low, unary)
    return Planes(code, width, b.from_host(low.view(np.int32), like), b.from_host(unary.view(np.int32), like))


def _choose(b: Backend, gaps: Array, dimension: int, count: Any) -> tuple[Any, Any]:
    """The code and the width that suit ``gaps``, by the size of a stratified sample of them."""
    width = rice_width(b, dimension, count)
    if dimension >= 1 << 31:  # where the remainders of the other code would not fit
        code, width = b.items(b.constant([RICE, width], "int64", gaps), 2)
        return code, width
    size = smaller(b, count, kernels.SAMPLE)
    divisor = max(size, 1) if isinstance(size, int) else size
    row = b.arange(size, gaps)
    jitter = b.shift_right(row * kernels.STRIDE & MASK32, 16)
    sample = b.take(gaps, (row * count + b.shift_right(jitter * count, 16)) // divisor)
    rice = b.sum(b.shift_right(sample, width) + width + 1)
    # One copy of the sample for each width that is tried, all in one array.
    ladder = width - b.arange(kernels.CANDIDATES, gaps)
    ladder = b.where(ladder > 0, ladder, 0)
    flat = b.arange(size * kernels.CANDIDATES, gaps)
    rung = flat // divisor
    widths = b.take(ladder, rung)
    bits = 2 * bit_length(b, b.shift_right(b.take(sample, flat - rung * size), widths) + 1) - 1 + widths
    totals = b.take(
        b.concat([b.constant([0], "int64", gaps), b.cumsum(bits)]),
        b.arange(kernels.CANDIDATES + 1, gaps) * size,
    )
    golomb = totals[1:] - totals[:-1]
    best = b.sum(b.take(ladder, b.reshape(b.argmax(-golomb), [1])))
    shorter = -b.max(-golomb) < rice
    choice = [b.cast(shorter, "int64") * GOLOMB, b.where(shorter, best, width)]  # RICE is 0
    code, width = b.items(b.constant(choice, "int64", gaps), 2)
    return code, width


def _bases(b: Backend, quotients: Array, code: Any, width: Any) -> tuple[Array, Array]:
    """The smallest gap of each quotient, and the number of bits of the remainder."""
    bases, widths = b.cond(
        code == RICE,
        lambda: (b.shift_left(quotients, width), quotients * 0 + width),
        lambda: (b.shift_left(b.shift_left(quotients * 0 + 1, quotients) - 1, width), quotients + width),
    )
    return bases, widths


def _maximum(b: Backend, x: Array, least: int) -> Array:
    return b.max(b.concat([x, b.constant([least], "int64", x)]))
