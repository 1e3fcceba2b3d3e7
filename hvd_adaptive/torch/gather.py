"""Messages of several tensors in few allgathers over ``horovod.torch``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core import message
from ..core.backend import Array
from .horovod import load


class Gather:
    """Collects the messages of a bucket of tensors and gathers each bucket from all ranks at once.

    A bucket leaves when its last tensor has been compressed, or when a result is wanted.  Names are
    ``tag`` and the bucket's number: the same on all ranks, whatever the order of their hooks.
    """

    def __init__(self, tag: str, buckets: Sequence[Sequence[int]], world_size: int, process_set: Any) -> None:
        self._tag = tag
        self._world_size = world_size
        self._process_set = process_set
        self._bucket_of = {slot: number for number, bucket in enumerate(buckets) for slot in bucket}
        self._waiting: list[dict[int, Array]] = [{} for _ in buckets]
        self._sizes = [len(bucket) for bucket in buckets]
        self._handles: list[Any] = [None] * len(buckets)
        self._results: dict[int, Array] = {}

    def add(self, slot: int, words: Array) -> int:
        """Hands over the message (int32, one-dimensional) of a tensor; the number of collectives that
        this started."""
        number = self._bucket_of[slot]
        self._waiting[number][slot] = words
        if len(self._waiting[number]) < self._sizes[number]:
            return 0
        self._start(number)
        return 1

    def result(self, slot: int) -> Array:
        """The messages of all ranks for a tensor, one after the other in rank order; waits for them."""
        if slot not in self._results:
            number = self._bucket_of[slot]
            if self._handles[number] is None:
                self._start(number)
            self._finish(number)
        return self._results.pop(slot)

    def _start(self, number: int) -> None:
        waiting = self._waiting[number]
        packed = torch.cat([waiting[slot] for slot in sorted(waiting)])
        self._handles[number] = load().allgather_async(
            packed, name=f"{self._tag}.{number}", process_set=self._process_set
        )

    def _finish(self, number: int) -> None:
        slots = sorted(self._waiting[number])
        gathered = load().synchronize(self._handles[number])
        self._handles[number], self._waiting[number] = None, {}
        parts = message.split(gathered, len(slots) * self._world_size)
        for position, slot in enumerate(slots):
            self._results[slot] = torch.cat(parts[position :: len(slots)])
