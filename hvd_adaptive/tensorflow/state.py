"""What a compressor keeps between steps, as TensorFlow variables.

The operations of different gradients run side by side, so none may wait for another's state:
TensorFlow orders whatever writes to one variable, and would chain the collectives of all layers.
A gradient's own variables (:class:`Slot`) are no trouble.  The one that all share
(:class:`Board`) is reached through an alias of its handle per gradient, which TensorFlow takes for
another variable; that is safe because step s writes to one half of it and reads the other half,
which step s - 1 wrote.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from ..core.errors import ConfigurationError
from ..core.form import Trial
from ..core.recipe import Recipe

CAPACITY = 4096
"""Gradients that one compressor can take."""


class Slot(tf.Module):
    """One gradient's memory (float32), directions (float32) and how they do (None where there are none),
    and record (float64).

    ``recipe``: fitted to ``shape``.  The record: the number of steps; T of the last one; :data:`TRAFFIC`
    of the last one and in all.
    """

    def __init__(self, recipe: Recipe, shape: tuple[int, ...], name: str) -> None:
        super().__init__(name="slot")
        self.label = name
        self.shape = shape
        self.dimension = math.prod(shape)
        state = recipe.state_length(self.dimension)
        self.residual = tf.Variable(tf.zeros([state]), trainable=False, name="residual") if state else None
        self.directions: tf.Variable | None = None
        self.trial: tf.Variable | None = None
        if recipe.lowrank is not None and not recipe.spares(self.dimension):
            self._start = recipe.lowrank.start()
            self.directions = tf.Variable(self._start, trainable=False, name="directions")
            trial = tf.zeros([len(Trial._fields)], tf.float64)
            self.trial = tf.Variable(trial, trainable=False, name="trial")
        self.record = tf.Variable(
            tf.zeros([2 + 2 * len(TRAFFIC)], tf.float64), trainable=False, name="record"
        )

    def known(self) -> tuple[Any, Any] | None:
        """Directions and trial, as they are read now."""
        if self.directions is None or self.trial is None:
            return None
        return self.directions.read_value(), self.trial.read_value()

    def forget(self) -> None:
        """Directions begin anew, as those of ranks that have learnt none."""
        if self.directions is not None and self.trial is not None:
            self.directions.assign(self._start)
            self.trial.assign(tf.zeros_like(self.trial))


TRAFFIC = (
    "bits_sent",
    "bits_received",
    "bits_dense",
    "messages",
    "nonfinite_steps",
    "compress_seconds",
    "decompress_seconds",
)


class Board(tf.Module):
    """A row for each gradient and each of two steps: float64, ``width`` elements."""

    def __init__(self, width: int) -> None:
        super().__init__(name="board")
        self.width = width
        self.rows = tf.Variable(tf.zeros([2 * CAPACITY, width], tf.float64), trainable=False, name="board")

    def alias(self) -> Any:
        """Another handle to the same rows."""
        return tf.identity(self.rows.handle)

    def read(self, alias: Any, step: Any, count: Any) -> Any:
        """The first ``count`` rows of a step (int64 scalars): float64, [count, width]."""
        places = step % 2 * CAPACITY + tf.range(tf.cast(count, tf.int64))
        rows = tf.raw_ops.ResourceGather(resource=alias, indices=places, dtype=tf.float64)
        return tf.ensure_shape(rows, [None, self.width])

    def write(self, alias: Any, step: Any, position: int, row: Any) -> Any:
        """The operation that sets one row."""
        place = tf.reshape(step % 2 * CAPACITY + position, [1])
        return tf.raw_ops.ResourceScatterUpdate(resource=alias, indices=place, updates=row[tf.newaxis])


def check_capacity(position: int) -> None:
    """Raises ConfigurationError for more gradients than the board has rows."""
    if position >= CAPACITY:
        raise ConfigurationError(f"a compressor takes at most {CAPACITY} gradients; use one per model")
