"""Passes over all coordinates of a tensor in the host's memory, compiled and on several threads.

As in :mod:`hvd_adaptive.core.kernels`, the primitives compute the same bits.  A float32 magnitude is
compared by its bits: for numbers that are not NaN their order as integers is the order of the
magnitudes, and integer loops vectorise.  Blocks without a coordinate to keep take no branch inside.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from .kernels import jit

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITE = np.uint32(0x7F800000)
_LARGEST = np.finfo(np.float32).max
_BLOCK, _SUMS, _PART = 64, 128, 16
_CHUNK = 1 << 20  # coordinates below which a second thread does not pay

CACHED = 1 << 16
"""Coordinates that stay in a core's cache while several things are done to them."""

Bits = Any


@jit
def _greatest(x: Bits) -> Any:
    most = np.uint32(0)
    for i in range(len(x)):
        most = max(most, x[i] & _MAGNITUDE)
    return most


@jit
def _compact(x: Bits, least: Any, offset: int, found: Any) -> int:
    """Positions (plus ``offset``) of magnitudes of at least ``least`` go to ``found``; their number."""
    count = 0
    whole = len(x) // _BLOCK * _BLOCK
    for start in range(0, whole, _BLOCK):
        block = x[start : start + _BLOCK]
        if _greatest(block) >= least:
            for part in range(0, _BLOCK, _PART):
                most = np.uint32(0)
                for i in range(_PART):
                    most = max(most, block[part + i] & _MAGNITUDE)
                if most >= least:
                    for i in range(_PART):
                        found[count] = offset + start + part + i
                        count += (block[part + i] & _MAGNITUDE) >= least
    for i in range(whole, len(x)):
        found[count] = offset + i
        count += (x[i] & _MAGNITUDE) >= least
    return count


@jit
def _add_and_compact(total: Any, x: Any, least: Any, offset: int, found: Any, before: Any) -> Any:
    """See :func:`add_at_least`: the number of positions, and of elements of ``x`` that are not finite.

    A sum that is not finite is no smaller than ``least``, so blocks of small sums need no second look.
    ``before``: room for a block.
    """
    count = 0
    wrong = np.int64(0)
    whole = len(x) // _SUMS * _SUMS
    for start in range(0, whole, _SUMS):
        block, own = total[start : start + _SUMS], x[start : start + _SUMS]
        large = np.int32(0)
        for i in range(_SUMS):
            old = block[i]
            value = old + own[i]
            before[i] = old
            block[i] = value
            large |= np.int32(not (abs(value) < least))
        if large:
            infinite = np.int32(0)
            for i in range(_SUMS):
                infinite |= np.int32(not (abs(block[i]) <= _LARGEST))
            if infinite:
                for i in range(_SUMS):
                    if not (abs(own[i]) <= _LARGEST):
                        block[i] = before[i]
                        wrong += 1
            for part in range(0, _SUMS, _PART):
                large = np.int32(0)
                for i in range(_PART):
                    large |= np.int32(abs(block[part + i]) >= least)
                if large:
                    for i in range(_PART):
                        found[count] = offset + start + part + i
                        count += abs(block[part + i]) >= least
    for i in range(whole, len(x)):
        if abs(x[i]) <= _LARGEST:
            total[i] += x[i]
        else:
            wrong += 1
        found[count] = offset + i
        count += abs(total[i]) >= least
    return count, wrong


def add_at_least(
    total: np.ndarray[Any, Any], x: np.ndarray[Any, Any], threshold: float
) -> tuple[np.ndarray[Any, Any], bool]:
    """In one pass adds what is finite of ``x`` to ``total`` and finds what :func:`at_least` would find
    there; and says whether all of ``x`` is finite.  Both are float32 and contiguous."""
    least = _bits(threshold).view(np.float32)
    wrong = []

    def fill(a: int, z: int, found: Any) -> int:
        before = np.empty(_SUMS, np.float32)
        count, others = _add_and_compact(total[a:z], x[a:z], least, a, found, before)
        wrong.append(others)
        return int(count)

    return _collected(x.size, fill), not any(wrong)


def add_and_project(
    total: np.ndarray[Any, Any],
    x: np.ndarray[Any, Any],
    directions: np.ndarray[Any, Any],
    right: bool,
    multiply: Callable[[Any, Any], Any],
) -> tuple[np.ndarray[Any, Any], bool]:
    """In one pass adds what is finite of ``x`` to ``total``, both rows x columns, and multiplies the sum by
    the directions: ``directions @ total.T`` (r x rows) where they are ``right`` (r x columns), and else
    ``directions @ total`` (r x columns).  Also says whether all of ``x`` is finite.  All are float32 and
    contiguous.  ``multiply``: of two matrices."""
    rows, columns = total.shape
    shape = (rows, len(directions)) if right else (len(directions), columns)
    result, finite = np.zeros(shape, np.float32), True
    step = max(1, CACHED // columns)
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, rows, step):
            part, own = total[begin : begin + step], x[begin : begin + step]
            if _greatest(own.reshape(-1).view(np.uint32)) >= _INFINITE:
                own, finite = np.where(np.isfinite(own), own, np.float32(0)), False
            part += own
            if right:
                result[begin : begin + step] = multiply(part, directions.T)
            else:
                result += multiply(directions[:, begin : begin + step], part)
    return result.T if right else result, finite


@jit
def _keep_best(magnitude: Any, positions: Any, least: Any, count: int, found: Any) -> None:
    room = count
    for i in range(len(magnitude)):
        room -= magnitude[i] > least
    kept = 0
    for i in range(len(magnitude)):
        tie = magnitude[i] == least and room > 0
        room -= tie
        if kept < count:
            found[kept] = positions[i]
        kept += tie or magnitude[i] > least


def best(x: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """Those of ``positions`` (int64, ascending) where ``x`` (float32, without NaN) has the ``count``
    largest magnitudes, the first ones among equals; all where they are fewer."""
    if len(positions) <= count:
        return positions
    magnitude = np.abs(x.take(positions))
    least = np.partition(magnitude, len(magnitude) - count)[len(magnitude) - count]
    found = np.empty(count, np.int64)
    _keep_best(magnitude, positions, least, count, found)
    return found


@jit
def _keep(x: Bits, mask: Any) -> None:
    for i in range(len(x)):
        x[i] &= mask


def clear(x: np.ndarray[Any, Any]) -> None:
    """Zeros in the place of ``x`` (float32, contiguous).

    It is read, too: a plain fill takes 2.5 times as long where it goes around the caches.  The compiler does
    not know the mask, and so cannot make a fill of the loop.
    """
    bits = x.view(np.uint32)
    _over_chunks(x.size, lambda a, z: _keep(bits[a:z], np.uint32(0)))


def all_finite(x: np.ndarray[Any, Any]) -> bool:
    """Whether no element of ``x`` (float32, contiguous) is NaN or infinite."""
    return greatest_bits(x) < int(_INFINITE)


def greatest_bits(x: np.ndarray[Any, Any]) -> int:
    """The bits of the greatest magnitude."""
    if not x.size:
        return 0
    bits = x.view(np.uint32)
    return int(max(_over_chunks(x.size, lambda a, z: int(_greatest(bits[a:z])))))


def at_least(x: np.ndarray[Any, Any], threshold: float) -> np.ndarray[Any, Any]:
    """int64 positions, ascending, of magnitudes of at least ``threshold`` and above zero.

    ``x``: float32, contiguous, without NaN.
    """
    least, bits = _bits(threshold), x.view(np.uint32)
    return _collected(x.size, lambda a, z, found: _compact(bits[a:z], least, a, found))


def _bits(threshold: float) -> Any:
    return np.uint32(max(int(np.float32(threshold).view(np.uint32)), 1))


def _collected(length: int, fill: Callable[[int, int, Any], int]) -> np.ndarray[Any, Any]:
    def chunk(a: int, z: int) -> np.ndarray[Any, Any]:
        found = np.empty(z - a + 1, np.int64)  # for the worst case; only touched as far as it is filled
        return found[: fill(a, z, found)].copy()

    parts = _over_chunks(length, chunk)
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def threads() -> int:
    """How many this rank may use: its share of the cores, or OMP_NUM_THREADS where that is set."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    local = os.environ.get("HOROVOD_LOCAL_SIZE", "1")
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(local) if local.isdigit() else 1))


@cache
def _pool(size: int, process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(size, thread_name_prefix="hvd_adaptive")


def _over_chunks(length: int, work: Callable[[int, int], Any]) -> list[Any]:
    """``work(start, end)`` on equal parts of ``0 .. length``, in order."""
    parts = max(1, min(threads(), length // _CHUNK))
    if parts == 1:
        return [work(0, length)]
    ends = [length * p // parts for p in range(parts + 1)]
    pool = _pool(parts - 1, os.getpid())  # a forked child has no use for its parent's threads
    others = [pool.submit(work, a, z) for a, z in itertools.pairwise(ends[1:])]
    return [work(0, ends[1]), *(other.result() for other in others)]
