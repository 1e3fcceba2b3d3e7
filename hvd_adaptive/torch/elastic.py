"""Elastic training: ranks come and go, and nobody's residual is overwritten.

from horovod.torch import elastic
from hvd_adaptive.torch.elastic import ElasticState

@elastic.run
def train(state):
    for state.batch in range(state.batch, batches):
        ...
        state.optimizer.step()
        state.commit()

state = ElasticState(model=model, optimizer=optimizer, compression=compression, batch=0)
train(state)
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..core.elastic import Change, Presence, change
from ..core.errors import ConfigurationError
from .compressor import Compressor
from .horovod import load

load()
from horovod.torch.elastic import TorchState  # noqa: E402

_log = logging.getLogger("hvd_adaptive")


class ElasticState(TorchState):
    """Horovod's ``TorchState`` for a model that is trained with a compressor.

    ``commit`` also keeps this rank's residuals in memory, and ``restore`` goes back to them.  When the
    ranks meet again, who stayed keeps its residuals, who came begins with none, and steps and price
    are those of rank 0.

    ``changes``: what became of the ranks each time they met, with what was lost; also logged as a
    warning where something was.

    Parameters
    ----------
    model, optimizer, and further keywords: as for ``TorchState``.
    compression: the :class:`Compressor` that the optimizer was given.
    """

    def __init__(
        self, model: Any = None, optimizer: Any = None, *, compression: Compressor, **kwargs: Any
    ) -> None:
        if not isinstance(compression, Compressor):
            raise ConfigurationError(
                f"compression must be a compressor of hvd_adaptive.torch.Compression, not {compression!r}"
            )
        self.compression = compression
        self.changes: list[Change] = []
        self._before = 0
        self._kept = compression.state_dict()
        super().__init__(model=model, optimizer=optimizer, **kwargs)

    def save(self) -> None:
        super().save()
        self._kept = self.compression.state_dict()

    def restore(self) -> None:
        super().restore()
        self.compression.load_state_dict(self._kept)

    def reset(self) -> None:
        super().reset()
        self.compression.rejoin(self.compression.common_state())  # its handles were of the ranks before

    def sync(self) -> None:
        super().sync()
        hvd, compression = load(), self.compression
        energy = sum(float(r.double().square().sum()) for r in compression.residuals().values())
        own = torch.tensor([[float(self._before), energy]], dtype=torch.float64)
        rows = hvd.allgather(own, name="hvd_adaptive.elastic.presence").tolist()
        self.changes.append(change([Presence(int(before), energy) for before, energy in rows]))
        if self.changes[-1].lost:
            _log.warning("the ranks have changed: %s", self.changes[-1])
        compression.rejoin(hvd.broadcast_object(compression.common_state(), 0, name="hvd_adaptive.elastic"))
        self._before = hvd.size()
        self.save()
