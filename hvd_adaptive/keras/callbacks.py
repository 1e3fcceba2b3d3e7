"""Keras 3 callbacks for training on several ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ..core.errors import ConfigurationError
from ..tensorflow.horovod import load

hvd = load()

# What tf.summary.scalar writes; this way TensorBoard itself need not be installed.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
)


class BroadcastInitialState(keras.callbacks.Callback):
    """Before training, gives every rank the weights and the optimizer state of one.

    ``root_rank``: the rank that has them.  Random seeds stay each rank's own.
    """

    def __init__(self, root_rank: int = 0, process_set: Any = hvd.global_process_set) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.process_set = process_set

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not self.process_set.included():
            return
        variables = [v.value for v in [*self.model.weights, *self.model.optimizer.variables]]
        hvd.broadcast_variables(variables, self.root_rank, process_set=self.process_set)


class AverageMetrics(keras.callbacks.Callback):
    """Replaces the metrics of each epoch by their means over the ranks, for itself and the
    callbacks that stand after it.  All ranks must have the same metrics."""

    def __init__(self, process_set: Any = hvd.global_process_set) -> None:
        super().__init__()
        self.process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not logs or not self.process_set.included():
            return
        names = sorted(name for name, value in logs.items() if np.isscalar(value))
        local = tf.constant([logs[name] for name in names], tf.float64)
        mean = hvd.allreduce(local, op=hvd.Average, name="hvd_adaptive_metrics", process_set=self.process_set)
        logs.update(zip(names, mean.numpy().tolist(), strict=True))


class WarmUpLearningRate(keras.callbacks.Callback):
    """Raises the learning rate linearly, batch by batch, from ``target / world size`` to ``target``
    (Goyal et al., "Accurate, large minibatch SGD", 2017, section 2.2).

    ``target``: what the optimizer's learning rate shall be after ``epochs`` epochs of
    ``steps_per_epoch`` batches.
    """

    def __init__(
        self,
        target: float,
        epochs: float,
        steps_per_epoch: int,
        process_set: Any = hvd.global_process_set,
    ) -> None:
        super().__init__()
        if not (target > 0 and epochs > 0 and steps_per_epoch > 0):
            raise ConfigurationError(
                "target, epochs and steps_per_epoch must be above 0, not "
                f"{target!r}, {epochs!r} and {steps_per_epoch!r}"
            )
        self.target = target
        self.steps = round(epochs * steps_per_epoch)
        self.process_set = process_set
        self.step = 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.step > self.steps:
            return
        first = 1 / self.process_set.size()
        share = self.step / self.steps
        self.model.optimizer.learning_rate = self.target * (first + (1 - first) * share)
        self.step += 1


class LogCompression(keras.callbacks.Callback):
    """Writes what the compressor of the model's optimizer did to TensorBoard, from rank 0 of all.

    Under ``compression/``: ``ratio`` and ``bits_sent`` of the last step, ``total_ratio``, ``price`` and
    ``improvement``; under ``sparsity/``: T of each gradient; against the number of steps.

    Args:
        log_dir: where; the ``log_dir`` of ``keras.callbacks.TensorBoard`` puts them beside the rest.
        every: so many batches; 0 for the end of each epoch alone.
    """

    def __init__(self, log_dir: str, every: int = 0) -> None:
        super().__init__()
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ConfigurationError(f"every must be a number of batches, 0 or more, not {every!r}")
        self.log_dir = str(log_dir)
        self.every = every
        self._writer: Any = None
        self._compressor: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        compression = getattr(getattr(self.model.optimizer, "_distribution", None), "reduction", None)
        self._compressor = getattr(compression, "compression", None)
        if not callable(getattr(self._compressor, "statistics", None)):
            raise ConfigurationError(
                "LogCompression needs a model whose optimizer is a DistributedOptimizer with a compression "
                "of hvd_adaptive.tensorflow.Compression"
            )
        if hvd.rank() == 0:
            self._writer = tf.summary.create_file_writer(self.log_dir)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.every and (batch + 1) % self.every == 0:
            self._write()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._write()

    def _write(self) -> None:
        if self._writer is None:
            return
        found = self._compressor.statistics()
        scalars = {
            "compression/ratio": found.last.ratio,
            "compression/bits_sent": found.last.bits_sent,
            "compression/total_ratio": found.total.ratio,
            "compression/price": found.price,
            "compression/improvement": found.improvement,
            **{f"sparsity/{name}": count for name, count in found.sparsity.items()},
        }
        with self._writer.as_default(step=found.step):
            for name, value in scalars.items():
                tf.summary.write(name, tf.constant(value, tf.float32), metadata=_SCALAR)
        self._writer.flush()
