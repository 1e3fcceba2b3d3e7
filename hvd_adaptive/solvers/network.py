"""Where the workers are: one interface for many workers in this process and for Horovod ranks.

A network knows how many workers there are, which of them live here, and how to average their
messages.  Per-worker state of an algorithm is an array with one row per worker that lives here:
all n rows in a `Cluster`, one row on a Horovod rank.  Means are sums over all workers in rank
order, of decoded messages, by the same NumPy call in either place; so the same seed gives the same
iterates, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.compressors import Compressor
from ..core.errors import ConfigurationError

MOST_WORKERS = 1024
_LARGEST = 1e30  # of what is sent: the square of d such entries, and each in float32, stays finite


class Network(ABC):
    """Attributes: ``size``, the number of workers n; ``ranks``, those that live here;
    ``bits_per_worker``, bits sent so far, averaged over all workers; ``generators``, one per rank
    here; ``shared``, a generator in the same state on every worker (it costs no bits)."""

    def __init__(self, size: int, ranks: Sequence[int], seed: int) -> None:
        self.size = size
        self.ranks = list(ranks)
        self.bits_per_worker = 0.0
        self.shared = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
        self.generators = [
            np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1, rank))) for rank in self.ranks
        ]

    def average(self, compressor: Compressor, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compress and exchange one vector per worker.

        ``rows``: (ranks here, d).  Returns what was sent from here, decoded (ranks here, d), and
        the mean (d,) over all workers of what was sent.  Adds to ``bits_per_worker``.  Entries are held to
        +-1e30, and NaN is sent as 1e30: a diverging run stays encodable until `run` measures it.
        """
        if not np.abs(rows).max(initial=0.0) <= _LARGEST:
            rows = np.clip(np.nan_to_num(rows, nan=_LARGEST), -_LARGEST, _LARGEST)
        sent, everything, bits = self._exchange(compressor, rows)
        self.bits_per_worker += bits / self.size
        return sent, everything.sum(axis=0) / self.size

    def mean(self, rows: np.ndarray) -> np.ndarray:
        """The exact float64 mean (d,) over workers of (ranks here, d), for constants and
        measurements; not counted as communication."""
        return self.gather(rows).sum(axis=0) / self.size

    @abstractmethod
    def gather(self, rows: np.ndarray) -> np.ndarray:
        """(ranks here, ...) -> (size, ...), exact float64, not counted as communication."""

    @abstractmethod
    def gather_objects(self, objects: list[Any]) -> list[Any]:
        """One object per rank here -> one per worker, in rank order."""

    @abstractmethod
    def agree(self, **settings: float) -> None:
        """Raise :class:`SettingsMismatchError` on every rank where a number differs between ranks."""

    @abstractmethod
    def _exchange(self, compressor: Compressor, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Decoded rows of the ranks here, decoded rows of all, and the bits that all sent."""


class Cluster(Network):
    """``size`` workers (1 to 1,024) in this process."""

    def __init__(self, size: int, seed: int = 0) -> None:
        if not 1 <= size <= MOST_WORKERS:
            raise ConfigurationError(f"workers={size} must lie between 1 and {MOST_WORKERS}")
        super().__init__(size, range(size), seed)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(rows, dtype=np.float64)

    def gather_objects(self, objects: list[Any]) -> list[Any]:
        return objects

    def agree(self, **settings: float) -> None:
        """One process has one set of settings."""

    def _exchange(self, compressor: Compressor, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        decoded, bits = compressor.rows(rows, self.generators)
        return decoded, decoded, int(bits.sum())
