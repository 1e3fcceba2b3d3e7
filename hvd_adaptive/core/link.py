"""What a network charges for each collective, told from timing it.

Every rank runs :func:`measure` at the same time.  What it finds has been averaged over the ranks,
so that all of them reckon alike from then on.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .cost import LinkTime, Payload
from .errors import ConfigurationError

FORMAT = 1

SIZES = (16, 1024, 16_384, 65_536, 262_144, 1_048_576, 4_194_304)
"""Elements of 4 bytes that each rank hands over, smallest first."""

GREATEST_FILE = 1 << 20
"""Bytes; a calibration is a few hundred."""

REPEATS, LONGEST, ENOUGH = 3, 0.008, 0.07
"""As for :func:`measure`, where training waits for it: a quarter of a second in all.  What steps then take
tells the rest."""

_FASTEST = 1e-14  # seconds a byte where a fit finds none


class Collectives(Protocol):
    """A framework's collectives, over the ranks whose link is wanted."""

    def allgather(self, count: int) -> None:
        """Gathers ``count`` 4-byte elements of every rank, to the end."""

    def allreduce(self, count: int) -> None:
        """Sums ``count`` 4-byte elements over the ranks, to the end."""

    def mean(self, values: Sequence[float]) -> Sequence[float]:
        """The mean over the ranks of each of some numbers."""


@dataclass(frozen=True)
class Line:
    """Seconds of one collective: ``fixed + per_byte`` times the bytes that each rank hands over.

    ``error``: median relative distance of the measurements from the line.
    """

    fixed: float
    per_byte: float
    error: float = 0.0


@dataclass(frozen=True)
class Link:
    """The two collectives among ``world_size`` ranks, and ``compute``, the seconds of a step without
    communication (0: not measured)."""

    world_size: int
    allgather: Line
    allreduce: Line
    compute: float = 0.0

    def cost(self, payload: Payload) -> LinkTime:
        """The cost of a step over this link."""
        n = self.world_size
        return LinkTime(
            payload,
            bandwidth=8 * (n - 1) / max(self.allgather.per_byte, _FASTEST),
            latency=self.allgather.fixed / (n - 1),
            compute=self.compute,
            world_size=n,
            ring_bandwidth=8 * 2 * (n - 1) / n / max(self.allreduce.per_byte, _FASTEST),
            ring_latency=self.allreduce.fixed / (2 * (n - 1)),
        )

    def save(self, path: str | Path) -> None:
        """Writes JSON that :func:`load` reads."""
        Path(path).write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n")


def load(path: str | Path) -> Link:
    """Reads what :meth:`Link.save` wrote.

    Raises ConfigurationError where the file is missing or says something else.
    """
    again = "measure the link with: horovodrun -np N hvd-adaptive calibrate --json FILE"
    try:
        with Path(path).open("rb") as file:
            content = file.read(GREATEST_FILE + 1)
    except OSError as error:
        raise ConfigurationError(f"cost: {path} cannot be read ({error.strerror}); {again}") from error
    try:
        if len(content) > GREATEST_FILE:
            raise ValueError("it is too long")
        document = json.loads(content)
        if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
            raise ValueError(f"it is no calibration of format {FORMAT}")
        gather, reduce = (Line(**_numbers(document.pop(name))) for name in ("allgather", "allreduce"))
        world_size = document.pop("world_size")
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 2:
            raise ValueError(f"world_size is {world_size!r}")
        return Link(world_size, gather, reduce, **_numbers({"compute": 0.0, **document}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(f"cost: {path} is not a calibration ({error}); {again}") from error


def _numbers(document: Mapping[str, Any]) -> dict[str, float]:
    for name, value in document.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}")
    return {name: float(value) for name, value in document.items()}


_known: dict[Any, Link] = {}


def measured(ranks: Sequence[int], collectives: Collectives) -> Link:
    """The link between some ranks, all of which ask: measured unless all of them know it.

    All compressors of a process share the result, and put the same question: which of several
    compressors a backward pass comes to first may differ between ranks, so which of them asks must not
    matter.  In elastic training a newcomer does not know what the others have measured.
    """
    key = tuple(ranks)
    (knowing,) = collectives.mean([float(key in _known)])
    if knowing < 1 - 0.5 / len(ranks):
        _known[key] = measure(collectives, len(ranks), repeats=REPEATS, longest=LONGEST, enough=ENOUGH)
    return _known[key]


def measure(
    collectives: Collectives,
    world_size: int,
    *,
    repeats: int = 5,
    longest: float = 0.04,
    enough: float = math.inf,
    now: Callable[[], float] = time.perf_counter,
    report: Callable[[int, Sequence[float]], None] = lambda count, seconds: None,
) -> Link:
    """Times both collectives, on all ranks at once, over growing sizes until one takes more than
    ``longest`` seconds: each ``repeats`` times after a first one, fewer where that would take more than
    ``enough`` seconds.  ``report`` is told the elements and the seconds of each collective."""
    samples: list[tuple[int, Sequence[float]]] = []
    kinds = collectives.allgather, collectives.allreduce
    for count in SIZES:
        # First calls set buffers up, and count only where they take so long that this does not matter.
        seconds = collectives.mean([_timed(kind, count, now) for kind in kinds])
        times = [int(min(enough / max(first, 1e-9), repeats)) for first in seconds]  # alike on all ranks
        if any(times):
            seconds = collectives.mean(
                [
                    statistics.median(_timed(kind, count, now) for _ in range(number)) if number else first
                    for kind, number, first in zip(kinds, times, seconds, strict=True)
                ]
            )
        samples.append((4 * count, seconds))
        report(count, seconds)
        if len(samples) > 1 and max(seconds) > longest:
            break
    gather, reduce = (fit([(size, seconds[i]) for size, seconds in samples]) for i in range(2))
    return Link(world_size, gather, reduce)


def _timed(collective: Callable[[int], None], count: int, now: Callable[[], float]) -> float:
    began = now()
    collective(count)
    return now() - began


def fit(samples: Sequence[tuple[int, float]]) -> Line:
    """The line of least squared relative distance through (bytes, seconds), neither of whose
    coefficients is negative."""
    size, seconds = (np.array(column, dtype=np.float64) for column in zip(*samples, strict=True))
    seconds = np.maximum(seconds, 1e-9)
    terms = np.stack([1 / seconds, size / seconds], 1)
    fixed, per_byte = np.linalg.lstsq(terms, np.ones(len(size)), rcond=None)[0]
    if fixed < 0:
        fixed, per_byte = 0.0, _single(terms[:, 1])
    if per_byte < 0:
        fixed, per_byte = _single(terms[:, 0]), 0.0
    error = np.median(np.abs(terms @ [fixed, per_byte] - 1))
    return Line(float(fixed), float(per_byte), float(error))


def _single(term: np.ndarray[Any, Any]) -> float:
    return float(term.sum() / (term @ term))
