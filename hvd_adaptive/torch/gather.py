"""Messages of several tensors in few allgathers over ``horovod.torch``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core import parcel
from ..core.backend import Array
from ..core.statistics import Traffic
from .horovod import load

Count = Callable[[Traffic], None]


class Gather:
    """Collects the messages of a bucket of tensors and gathers each bucket from all ranks at once.

    A bucket leaves when its last tensor has been compressed, or when a result is wanted.  Names are
    ``tag`` and the bucket's number: the same on all ranks, whatever the order of their hooks.

    Which messages have come by when a bucket leaves may differ between ranks: one whose parameter
    was unused compresses it only when its optimizer steps, and that may be after a step of another
    optimizer.  So what is sent is a :mod:`parcel <hvd_adaptive.core.parcel>`, which states its
    contents, and a result is ready when it is complete; whatever is missing comes with the next round.
    All ranks have then received the same, and so agree whether there is a next round.
    """

    def __init__(self, tag: str, buckets: Sequence[Sequence[int]], world_size: int, process_set: Any) -> None:
        self._tag = tag
        self._world_size = world_size
        self._process_set = process_set
        self._bucket_of = {slot: number for number, bucket in enumerate(buckets) for slot in bucket}
        self._waiting: list[dict[int, Array]] = [{} for _ in buckets]
        self._sizes = [len(bucket) for bucket in buckets]
        self._underway: list[tuple[Any, int] | None] = [None] * len(buckets)
        self._received: dict[int, list[deque[Array]]] = {
            slot: [deque() for _ in range(world_size)] for slot in self._bucket_of
        }

    def add(self, slot: int, words: Array, count: Count) -> None:
        """Hands over the message (int32, one-dimensional) of a tensor.

        ``count`` is told of what is sent and received, here and in :meth:`result`.
        """
        number = self._bucket_of[slot]
        self._waiting[number][slot] = words
        if len(self._waiting[number]) == self._sizes[number]:
            self._start(number, count)

    def result(self, slot: int, count: Count) -> Array:
        """The messages of all ranks for a tensor, one after the other in rank order; waits for them."""
        number = self._bucket_of[slot]
        while not all(self._received[slot]):
            if self._underway[number] is None:
                self._start(number, count)
            self._finish(number, count)
        return torch.cat([messages.popleft() for messages in self._received[slot]])

    def _start(self, number: int, count: Count) -> None:
        waiting, self._waiting[number] = self._waiting[number], {}
        like = next(iter(waiting.values()), torch.zeros(0, dtype=torch.int32))
        packed = parcel.pack(waiting, like)
        handle = load().allgather_async(packed, name=f"{self._tag}.{number}", process_set=self._process_set)
        self._underway[number] = handle, packed.numel()
        count(Traffic(bits_sent=32 * packed.numel(), messages=1))

    def _finish(self, number: int, count: Count) -> None:
        underway = self._underway[number]
        assert underway is not None
        handle, own = underway
        self._underway[number] = None
        rest = load().synchronize(handle)
        count(Traffic(bits_received=32 * (rest.numel() - own)))
        slots = [slot for slot, own in self._bucket_of.items() if own == number]
        for rank, slot, words in parcel.unpack(rest, self._world_size, slots):
            self._received[slot][rank].append(words)
