"""The collectives of ``horovod.torch`` whose times tell of the link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .horovod import load


class Collectives:
    """See :class:`hvd_adaptive.core.link.Collectives`."""

    def __init__(self, process_set: Any) -> None:
        self._together = process_set

    def allgather(self, count: int) -> None:
        words = torch.zeros(count, dtype=torch.int32)
        load().allgather(words, name="hvd_adaptive.link.gather", process_set=self._together)

    def allreduce(self, count: int) -> None:
        hvd, words = load(), torch.zeros(count)
        hvd.allreduce_(words, name="hvd_adaptive.link.reduce", op=hvd.Sum, process_set=self._together)

    def mean(self, values: Sequence[float]) -> Sequence[float]:
        own = torch.tensor(values, dtype=torch.float64)
        mean: torch.Tensor = load().allreduce(own, name="hvd_adaptive.link.mean", process_set=self._together)
        return [float(value) for value in mean]
