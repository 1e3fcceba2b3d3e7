"""Elastic training: ranks come and go, and nobody's residual is overwritten.

import horovod.tensorflow as hvd
from hvd_adaptive.tensorflow.elastic import ElasticState

@hvd.elastic.run
def train(state):
    step = tf.function(...)  # traced anew, for the ranks at hand
    for state.batch in range(state.batch, batches):
        step(...)
        state.commit()

state = ElasticState(model, compression=compression, batch=0)
train(state)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from ..core.elastic import Change, Presence, change
from ..core.errors import ConfigurationError
from .compressor import Compressor
from .horovod import load

load()
from horovod.common.elastic import ObjectState  # noqa: E402

_log = logging.getLogger("hvd_adaptive")


class ElasticState(ObjectState):
    """The state of a model, of Keras 3 or legacy Keras, or of any variables, trained with a compressor.

    ``commit`` keeps everything in memory, this rank's residuals too, and ``restore`` goes back to it.
    When the ranks meet again, variables are those of rank 0; who stayed keeps its residuals, who
    came begins with none, and steps and price are those of rank 0.  A Keras model's training function
    is made anew; functions of your own must be traced again after every change of the ranks.

    ``changes``: what became of the ranks each time they met, with what was lost; also logged as a
    warning where something was.

    Parameters
    ----------
    model: a Keras model that has been built, or None.
    optimizer: the model's, unless it has it itself; built, so that newcomers can take over its state.
    variables: further variables to keep and to broadcast.
    compression: the :class:`Compressor` that the optimizer was given.
    kwargs: plain values, such as the number of the batch; attributes of the state.
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        variables: Iterable[Any] = (),
        compression: Compressor,
        **kwargs: Any,
    ) -> None:
        if not isinstance(compression, Compressor):
            raise ConfigurationError(
                f"compression must be one of hvd_adaptive.tensorflow.Compression, not {compression!r}"
            )
        hvd = load()
        self.model, self.compression = model, compression
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        self.variables = list(variables)
        self.changes: list[Change] = []
        self._before = 0
        self._keep()
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **kwargs)

    def save(self) -> None:
        super().save()
        self._keep()

    def restore(self) -> None:
        super().restore()
        for variable in [*self._shared(), *self.compression.variables]:
            kept = self._kept.get(variable.ref())
            variable.assign(tf.zeros_like(variable) if kept is None else kept)

    def reset(self) -> None:
        super().reset()
        self.compression.rejoin(self.compression.common_state())
        if callable(getattr(self.model, "make_train_function", None)):
            self.model.make_train_function(force=True)

    def sync(self) -> None:
        hvd, compression = load(), self.compression
        hvd.broadcast_variables(self._shared(), 0)
        super().sync()
        energy = sum(
            float(tf.reduce_sum(tf.cast(r, tf.float64) ** 2)) for r in compression.residuals().values()
        )
        own = tf.constant([[float(self._before), energy]], tf.float64)
        rows = hvd.allgather(own, name="hvd_adaptive.elastic.presence").numpy().tolist()
        self.changes.append(change([Presence(int(before), energy) for before, energy in rows]))
        if self.changes[-1].lost:
            _log.warning("the ranks have changed: %s", self.changes[-1])
        compression.rejoin(hvd.broadcast_object(compression.common_state(), 0, name="hvd_adaptive.elastic"))
        self._before = hvd.size()
        self.save()

    def _shared(self) -> list[Any]:
        """The TensorFlow variables that all ranks hold alike."""
        theirs = getattr(self.optimizer, "variables", ())
        theirs = theirs() if callable(theirs) else theirs  # a method in legacy Keras
        all_of_them = [*getattr(self.model, "variables", ()), *theirs, *self.variables]
        found = [v if isinstance(v, tf.Variable) else v.value for v in all_of_them]
        return list({v.ref(): v for v in found}.values())

    def _keep(self) -> None:
        self._kept = {v.ref(): tf.identity(v) for v in [*self._shared(), *self.compression.variables]}
