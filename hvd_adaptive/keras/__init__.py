"""Keras 3 (on TensorFlow) over Horovod, with any gradient compression.

Horovod 0.28.1's own Keras wrapper serves legacy Keras (``tf_keras``) only; this one serves Keras 3::

    import horovod.tensorflow as hvd
    import keras
    from hvd_adaptive.keras import BroadcastInitialState, Compression, DistributedOptimizer

    hvd.init()
    optimizer = DistributedOptimizer(keras.optimizers.Adam(), compression=Compression.adaptive())
    model.compile(optimizer=optimizer, loss=...)
    model.fit(..., callbacks=[BroadcastInitialState()])

"""

from __future__ import annotations

from ..core.errors import ConfigurationError, MissingDependencyError

try:
    import keras
except ImportError as error:
    raise MissingDependencyError(
        "hvd_adaptive.keras needs Keras 3 on TensorFlow; install tensorflow>=2.16, which brings it"
    ) from error

if not keras.version().startswith("3."):
    raise ConfigurationError(
        f"hvd_adaptive.keras is for Keras 3, and this is Keras {keras.version()}; with legacy Keras use "
        "horovod.tensorflow.keras.DistributedOptimizer(optimizer, compression=...)"
    )
if keras.backend.backend() != "tensorflow":
    raise ConfigurationError(
        f"Keras runs on {keras.backend.backend()}, and Horovod reduces Keras gradients on TensorFlow only; "
        "set KERAS_BACKEND=tensorflow before keras is imported"
    )

from ..tensorflow import Compression
from .callbacks import AverageMetrics, BroadcastInitialState, LogCompression, WarmUpLearningRate
from .optimizer import DistributedOptimizer

__all__ = [
    "AverageMetrics",
    "BroadcastInitialState",
    "Compression",
    "DistributedOptimizer",
    "LogCompression",
    "WarmUpLearningRate",
]
