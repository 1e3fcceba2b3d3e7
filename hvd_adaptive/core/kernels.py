"""Compiled loops for arrays in the host's memory: one small function each.

Every kernel computes the very bits that the primitive operations next to its use compute; they are
a matter of speed alone.  Without numba, or on a GPU, or in a TensorFlow graph, the primitives run.
Words are ``uint32`` and positions ``int64`` here.  Kernels compile at their first call and are
cached on disk; they release the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .backend import Array, Backend

try:
    import numba
    from numba.cpython.unsafe.numbers import leading_zeros, trailing_zeros

    AVAILABLE = True
except ImportError:
    AVAILABLE = False

# Arrays of uint32, int64 and float32.  The loops are typed by numba, not by annotations.
Words = Any
Indices = Any
Values = Any

_M32 = np.uint64(0xFFFFFFFF)
STRIDE = 0x9E3779B1  # odd and without structure: (golden ratio - 1) * 2**32
_STRIDE = np.uint64(STRIDE)

RICE, GOLOMB = 0, 1  # the codes of core.bits, and what it looks at to choose
SAMPLE = 1024
CANDIDATES = 16

# What read_indices answers.
SOUND, WRONG_COUNT, WRONG_SIZE, BEYOND = 0, 1, 2, 3


def host(b: Backend, x: Array) -> np.ndarray[Any, Any] | None:
    """``x`` as a NumPy array for the kernels, or None where they cannot serve it."""
    return b.host(x) if AVAILABLE else None


@contextmanager
def disabled() -> Iterator[None]:
    """Within, the primitives run in place of the kernels: for tests and comparisons."""
    global AVAILABLE
    before, AVAILABLE = AVAILABLE, False
    try:
        yield
    finally:
        AVAILABLE = before


def jit(function: Callable[..., Any]) -> Any:
    """``function`` compiled at its first call; kept on disk where a directory can be written."""
    if not AVAILABLE:
        return function
    try:
        return numba.njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:  # nowhere to keep it
        return numba.njit(function, nogil=True, error_model="numpy")


@jit
def _mix(x: Any) -> Any:
    """See hashing.mix; of uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@jit
def checksum(words: Words) -> Any:
    """The hash of ``words[1:]``; see hashing.checksum."""
    total = np.uint64(0)
    for i in range(0, len(words) - 2, 2):
        key = np.uint64(i + 1) * _STRIDE
        total += ((words[i + 1] + key) & _M32) * ((words[i + 2] + key + _STRIDE) & _M32)
    key = np.uint64(len(words) - 1) * _STRIDE
    total += ((words[len(words) - 1] + key) & _M32) * ((key + _STRIDE) & _M32)
    return _mix(total) & _M32


@jit
def _quotient(gap: int, code: int, width: int) -> Any:
    if code == RICE:
        return gap >> width
    return 63 - np.int64(leading_zeros((gap >> width) + 1))


@jit
def choose_code(indices: Indices, width: int) -> tuple[Any, Any]:
    """``(code, width)`` by the size of a sample of the gaps, given the best ``width`` for RICE."""
    count = len(indices)
    size = min(count, SAMPLE)
    rice = 0
    golomb = np.zeros(CANDIDATES, np.int64)
    for row in range(size):
        jitter = ((row * np.int64(STRIDE)) & 0xFFFFFFFF) >> 16
        at = (row * count + ((jitter * count) >> 16)) // size
        gap = indices[at] - (indices[at - 1] if at > 0 else -1) - 1
        rice += (gap >> width) + width + 1
        for rung in range(CANDIDATES):
            tried = max(width - rung, 0)
            golomb[rung] += 2 * _quotient(gap, GOLOMB, tried) + 1 + tried
    best = np.argmin(golomb)
    if golomb[best] < rice:
        return GOLOMB, max(width - best, 0)
    return RICE, width


@jit
def measure_indices(indices: Indices, dimension: int, code: int, width: int) -> tuple[Any, Any]:
    """``(quotient bits, remainder bits)``; negative where the indices do not ascend within range."""
    before = np.int64(-1)
    total = np.int64(0)
    wrong = False
    for i in range(len(indices)):
        gap = indices[i] - before - 1
        before = indices[i]
        wrong |= gap < 0 or before >= dimension
        total += _quotient(gap, code, width)
    if wrong:
        return np.int64(-1), np.int64(-1)
    return total + len(indices), len(indices) * width + code * total


@jit
def write_indices(indices: Indices, code: int, width: int, low: Words, unary: Words) -> None:
    """Fill the two planes, which are zero."""
    before = np.int64(-1)
    position = np.int64(0)
    pending = np.uint64(0)
    filled = np.int64(0)
    at = np.int64(0)
    for i in range(len(indices)):
        gap = indices[i] - before - 1
        before = indices[i]
        quotient = _quotient(gap, code, width)
        base = quotient if code == RICE else (np.int64(1) << quotient) - 1
        position += quotient
        unary[position >> 5] |= np.uint32(1) << np.uint32(position & 31)
        position += 1
        pending |= np.uint64(gap - (base << width)) << np.uint64(filled)
        filled += width + code * quotient
        if filled >= 32:
            low[at] = pending & _M32
            at += 1
            pending >>= np.uint64(32)
            filled -= 32
    if filled > 0:
        low[at] = pending & _M32


@jit
def read_indices(low: Words, unary: Words, code: int, width: int, dimension: int, out: Indices) -> int:
    """Fill ``out``, or say what is wrong: each index is checked before the next is read."""
    count = len(out)
    largest = dimension >> width if code == RICE else 31 - width
    found = np.int64(0)
    index = np.int64(-1)
    before = np.int64(-1)
    pending = np.uint64(0)
    filled = np.int64(0)
    at = np.int64(0)
    for i in range(len(unary)):
        word = unary[i]
        while word != 0:
            position = 32 * i + np.int64(trailing_zeros(word))
            word &= word - np.uint32(1)
            quotient = position - before - 1
            before = position
            if found == count:
                return WRONG_COUNT
            if quotient > largest:
                return BEYOND
            bits = width + code * quotient
            if filled < bits:
                if at == len(low):
                    return WRONG_SIZE
                pending |= np.uint64(low[at]) << np.uint64(filled)
                at += 1
                filled += 32
            base = quotient if code == RICE else (np.int64(1) << quotient) - 1
            remainder = np.int64(pending & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1)))
            pending >>= np.uint64(bits)
            filled -= bits
            index += (base << width) + remainder + 1
            if index >= dimension:
                return BEYOND
            out[found] = index
            found += 1
    if found != count:
        return WRONG_COUNT
    return SOUND if at == len(low) else WRONG_SIZE


@jit
def draw_strata(key: Any, dimension: int, out: Indices) -> None:
    """Fill ``out`` with a coordinate of each stratum, rotated; see selection.shared_random."""
    count = len(out)
    rotation = _drawn(count, key) % dimension
    start = 0
    for i in range(count):
        end = (i + 1) * dimension // count
        out[i] = (start + _drawn(i, key) % (end - start) + rotation) % dimension
        start = end


@jit
def _drawn(i: int, key: Any) -> Any:
    """See hashing.integers."""
    x = _mix(np.uint64(i) * np.uint64(0x9E3779B97F4A7C15) + key)
    return np.int64(x & np.uint64(0x7FFFFFFFFFFFFFFF))


@jit
def add_at(total: Values, indices: Indices, values: Values) -> None:
    """``total[indices] += values``, in order."""
    for i in range(len(indices)):
        total[indices[i]] += values[i]


@jit
def fit_ladder(words: Words, binades: int, rungs: int) -> tuple[Any, Any]:
    """``(low, step)`` of float32 bits ``words``; see values.Fitted."""
    high: Any = np.uint32(2 << 23)
    least: Any = np.uint32(0xFFFFFFFF)  # of the magnitudes less one, so that zero is the largest
    for i in range(len(words)):
        magnitude = np.uint32(words[i] & np.uint32(0x7FFFFFFF))
        high = max(high, magnitude)
        least = min(least, np.uint32(magnitude - np.uint32(1)))
    top = np.int64(high)
    low = max(min(np.int64(least) + 1, top), top - (np.int64(binades) << 23), np.int64(2 << 23))
    return low, max((top - low + rungs - 1) // rungs, 1)


@jit
def mean_magnitude(words: Words) -> Any:
    """The float32 mean of the magnitudes of float32 bits ``words``, summed in integers."""
    top: Any = np.uint32(1)
    for i in range(len(words)):
        top = max(top, np.uint32((words[i] & np.uint32(0x7FFFFFFF)) >> np.uint32(23)))
    total = np.int64(0)
    for i in range(len(words)):
        magnitude = np.int64(words[i] & np.uint32(0x7FFFFFFF))
        exponent: Any = magnitude >> 23
        mantissa = magnitude & 0x7FFFFF
        if exponent > 0:
            mantissa += 1 << 23
        else:
            exponent = 1
        total += (mantissa << 6) >> min(np.int64(top) - exponent, 62)
    # 2.0 ** -156 is beyond float32, not beyond float64.
    return np.float32(np.float64(total) / np.float64(max(len(words), 1)) * 2.0 ** (np.int64(top) - 156))


@jit
def ladder_codes(words: Words, low: int, step: int, bits: int) -> Words:
    """Codes of ``bits`` bits of float32 bits ``words``; see values.Fitted."""
    codes = np.empty(len(words), np.uint32)
    inverse = 1.0 / np.float64(step)
    for i in range(len(words)):
        magnitude = np.int64(words[i] & np.uint32(0x7FFFFFFF))
        # Division by multiplication: exact but for one, which the remainder shows.
        above = magnitude - low + (step >> 1)
        rung = np.int64(np.float64(above) * inverse)
        rest = above - rung * step
        rung += np.int64(rest >= step) - np.int64(rest < 0) + 1
        if magnitude < low:
            rung = np.int64(magnitude > low - (1 << 23))
        codes[i] = np.uint32(rung) | np.uint32((words[i] >> np.uint32(31)) << np.uint32(bits - 1))
    return codes


@jit
def ladder_words(codes: Words, low: int, step: int, bits: int) -> Words:
    """Undoes :func:`ladder_codes`."""
    words = np.empty(len(codes), np.uint32)
    for i in range(len(codes)):
        rung = np.int64(codes[i] & np.uint32((1 << (bits - 1)) - 1))
        magnitude: Any = min(low + (rung - 1) * step, 0x7F7FFFFF) if rung > 0 else np.int64(0)
        words[i] = np.uint32(magnitude) | np.uint32((codes[i] >> np.uint32(bits - 1)) << np.uint32(31))
    return words


@jit
def bfloat16_codes(words: Words) -> Words:
    """The upper halves of float32 bits ``words``, rounded; see values.BFloat16."""
    codes = np.empty(len(words), np.uint32)
    for i in range(len(words)):
        magnitude = np.uint32(words[i] & np.uint32(0x7FFFFFFF))
        odd = np.uint32((magnitude >> np.uint32(16)) & np.uint32(1))
        rounded = np.uint32((magnitude + np.uint32(0x7FFF) + odd) >> np.uint32(16))
        codes[i] = min(rounded, np.uint32(0x7F7F)) | np.uint32((words[i] >> np.uint32(31)) << np.uint32(15))
    return codes


@jit
def pack(codes: Words, bits: int, out: Words) -> None:
    """``32 // bits`` codes to a word; the place of bits.pack for codes of 1, 2, 4, 8 or 16 bits."""
    each = 32 // bits
    full = len(codes) // each
    for i in range(full):
        packed = np.uint32(0)
        for j in range(each):
            packed |= np.uint32(codes[i * each + j] << np.uint32(j * bits))
        out[i] = packed
    for i in range(full * each, len(codes)):
        out[full] |= np.uint32(codes[i] << np.uint32((i - full * each) * bits))


@jit
def unpack(words: Words, bits: int, count: int) -> Words:
    """The ``count`` codes of ``words``."""
    codes = np.empty(count, np.uint32)
    each = 32 // bits
    mask = np.uint32((1 << bits) - 1)
    full = count // each
    for i in range(full):
        for j in range(each):
            codes[i * each + j] = (words[i] >> np.uint32(j * bits)) & mask
    for i in range(full * each, count):
        codes[i] = (words[full] >> np.uint32((i - full * each) * bits)) & mask
    return codes
