"""The collectives of ``horovod.tensorflow``, run eagerly, whose times tell of the link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from .horovod import load


class Collectives:
    """See :class:`hvd_adaptive.core.link.Collectives`."""

    def __init__(self, process_set: Any) -> None:
        self._together = process_set

    def allgather(self, count: int) -> None:
        words = tf.zeros([count], tf.int32)
        load().allgather(words, name="hvd_adaptive.link.gather", process_set=self._together).numpy()

    def allreduce(self, count: int) -> None:
        hvd, words = load(), tf.zeros([count])
        hvd.allreduce(words, name="hvd_adaptive.link.reduce", op=hvd.Sum, process_set=self._together).numpy()

    def mean(self, values: Sequence[float]) -> Sequence[float]:
        own = tf.constant(values, tf.float64)
        mean = load().allreduce(own, name="hvd_adaptive.link.mean", process_set=self._together)
        return [float(value) for value in mean.numpy()]
