"""The object behind ``hvd.DistributedOptimizer(compression=...)``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core import ballot, plans
from ..core.backend import Array
from ..core.errors import ConfigurationError
from ..core.link import measured
from ..core.recipe import Recipe, given
from ..core.statistics import Statistics, Traffic
from ..core.worker import Context, Worker
from .backend import TORCH
from .gather import Gather
from .horovod import load
from .host import HOST
from .link import Collectives
from .parameters import Parameters, refuse_adasum


class _Ticket(NamedTuple):
    """What ``compress`` hands to ``decompress`` through Horovod."""

    context: Context
    gradient: torch.Tensor  # while the step lasts; what it holds is spent once it is compressed


class Compressor:
    """Compresses the gradients of one optimizer for ``horovod.torch``.

    Made by :class:`hvd_adaptive.torch.Compression`; pass it as ``compression=`` to
    ``hvd.DistributedOptimizer``.  It keeps one residual per parameter, float32 on the parameter's
    device, which belongs to this rank alone.

    Parameters
    ----------
    recipe: a :class:`~hvd_adaptive.core.recipe.Recipe`, a recipe's name, or a mapping as for
        :func:`~hvd_adaptive.core.recipe.from_config`.
    named_parameters: pairs of name and parameter, or a module.
    overrides: other recipes for the parameters whose names match a pattern (as in :mod:`fnmatch`;
        the first that matches decides), such as
        ``{"*embedding*": {"recipe": "topk", "ratio": 0.001}, "*.bias": "none"}``.
    process_set: the process set that the optimizer reduces over; all ranks by default.
    name: tells compressors apart in the names of collectives, where the ranks do not make their
        compressors in the same order.
    scaler: the optimizer's ``torch.amp.GradScaler`` (or what else has ``get_scale()``), which changes the
        unit of its gradients: residuals follow the scale, and what was sent in a step that the scaler
        skips is taken back.  It is asked once per step.
    """

    def __init__(
        self,
        recipe: Recipe | str | Mapping[str, Any],
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        overrides: Mapping[str, Any] | None = None,
        process_set: Any = None,
        name: str | None = None,
        scaler: Any = None,
    ) -> None:
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise ConfigurationError(
                f"scaler must be a torch.amp.GradScaler, or have its get_scale(), not {scaler!r}"
            )
        self._scaler = scaler
        self._parameters = Parameters(named_parameters)
        self._on_host = all(tensor.device.type == "cpu" for tensor in self._parameters.tensors)
        backend = HOST if self._on_host else TORCH
        self._worker = Worker(backend, recipe, self._parameters.shapes, overrides)
        self._process_set = process_set
        self._tag = plans.tag(name)

    # -- Horovod's interface

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What Horovod allreduces in place of ``tensor``, and the context for :meth:`decompress`.

        Raises UnknownTensorError for a tensor that is no known parameter's gradient, and
        ConfigurationError under Adasum or outside of the process set.
        """
        worker = self._worker
        began = worker.clock.now()
        refuse_adasum(tensor)
        slot = self._parameters.slot(tensor)
        self._meet()
        if self._scaler is not None and worker.idle:
            worker.follow(self._scaler.get_scale())
        bits = _bits(tensor)
        with torch.no_grad():
            outgoing, context = worker.outgoing(slot, self._array(tensor))
            if outgoing is None:
                # Horovod's allreduce knows no bfloat16, and wants its tensors contiguous.
                ring = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous()
                payload = True
            else:
                ring = _tensor(outgoing.ring)
                payload = ring.numel() > ballot.SIZE
                if worker.gathers(context):
                    words = _tensor(outgoing.message)
                    self._gather_of(context).add(slot, words, partial(worker.count, context))
        ended = worker.clock.now()
        worker.clock.compressing(began, ended)
        worker.count(
            context,
            Traffic(
                bits_sent=_bits(ring),
                bits_dense=bits,
                messages=int(payload),
                compress_seconds=ended - began,
            ),
        )
        return ring, _Ticket(context, tensor)

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The aggregated gradient, in the shape and dtype of the one that was compressed.

        Raises SettingsMismatchError, on every rank, where the ranks were given different settings,
        and MessageError where a message was damaged.
        """
        if ctx is None:  # a sparse gradient, which Horovod gathers itself without asking us
            return tensor
        worker, context, gradient = self._worker, ctx.context, ctx.gradient
        began = worker.clock.now()
        with torch.no_grad():
            if context.pending is None:
                result, waited = tensor.to(gradient.dtype), 0.0
                worker.as_it_is(context, self._array(result).reshape(-1))
            else:
                ring = self._array(tensor)
                worker.settle(context, ring)
                messages, waited = self._messages(context)
                aggregate = _tensor(worker.aggregate(context, ring, messages, self._storage(gradient)))
                result = aggregate.to(gradient.dtype).view(gradient.shape)
        seconds = worker.clock.now() - began - waited
        worker.count(context, Traffic(bits_received=_bits(tensor), decompress_seconds=seconds))
        worker.done(context)
        return result

    # -- the core's arrays

    def _array(self, tensor: torch.Tensor) -> Array:
        """A tensor as the core takes it, in the same memory where that can be."""
        tensor = tensor.detach()
        if not self._on_host:
            return tensor
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()

    def _storage(self, gradient: torch.Tensor) -> Array | None:
        """The gradient's storage, flat, for the aggregate; None where it does not fit."""
        fits = gradient.dtype == torch.float32 and gradient.is_contiguous()
        return self._array(gradient).reshape(-1) if fits else None

    # -- transport

    def _messages(self, context: Context) -> tuple[Array | None, float]:
        """All ranks' messages for a tensor, and the seconds that we waited for them."""
        worker = self._worker
        if not worker.gathers(context):
            return None, 0.0
        began = worker.clock.now()
        messages = self._gather_of(context).result(context.slot, partial(worker.count, context))
        return self._array(messages), worker.clock.now() - began

    def _gather_of(self, context: Context) -> Gather:
        return self._first if context.control.first else self._gather

    def _meet(self) -> None:
        """Learns who takes part: at call time, because elastic jobs change it."""
        hvd = load()
        process_set = self._process_set or hvd.global_process_set
        if not process_set.included():
            raise ConfigurationError(
                f"rank {hvd.rank()} is not in the process set that this compressor was given; give "
                "the compressor and hvd.DistributedOptimizer the same process_set="
            )
        ranks = list(process_set.ranks) if process_set.process_set_id else list(range(hvd.size()))
        link = None
        if self._worker.met(ranks, hvd.rank()):
            if not self._worker.wants_link:
                return
            link = measured(ranks, Collectives(process_set))
        self._worker.meet(ranks, hvd.rank(), link)
        self._gather = Gather(self._tag, self._worker.buckets(), len(ranks), process_set)
        first = self._worker.buckets(first=True)
        self._first = Gather(f"{self._tag}.first", first, len(ranks), process_set)

    # -- settings

    def set_recipe(
        self,
        recipe: Recipe | str,
        *,
        overrides: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Goes on with another recipe; every residual is kept, and none is lost.

        ``recipe``: a :class:`~hvd_adaptive.core.recipe.Recipe`, or the name of one, with its options.
        ``overrides``: as for the constructor; those in force until now end.  Call it on all ranks,
        between the same two steps: where one does not, the next step raises SettingsMismatchError, or
        Horovod's own error for tensors that differ in shape, on all of them.

        Raises ConfigurationError for bad settings, and in the middle of a step.
        """
        self._worker.set_recipe(given(recipe, options), overrides)

    # -- reports and checkpoints

    def statistics(self) -> Statistics:
        """What was sent, received and spent, in the last step and in all."""
        return self._worker.statistics()

    def residuals(self) -> dict[str, torch.Tensor]:
        """The residual of each parameter that has one: float32, flat; this rank's own, not a copy."""
        return {name: _tensor(residual) for name, residual in self._worker.residuals().items()}

    def state_dict(self) -> dict[str, Any]:
        """Residuals, steps, price and counts: tensors and plain numbers, for ``torch.save``.

        Residuals differ between ranks, so every rank saves its own.  Raises ConfigurationError in the
        middle of a step.
        """
        state: dict[str, Any] = _tensors(self._worker.state())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from :meth:`state_dict`.

        Raises ConfigurationError where the state is of other parameters or another recipe.
        """
        tensors = self._parameters.tensors

        def place(slot: int, kept: torch.Tensor) -> Array:
            return self._array(kept.detach().clone().to(tensors[slot].device))

        self._worker.restore(state, place)

    def common_state(self) -> dict[str, Any]:
        """What all ranks hold alike: plain numbers, for :meth:`rejoin`."""
        return self._worker.common()

    def rejoin(self, common: Mapping[str, Any]) -> None:
        """Goes on among other ranks, at the step of the rank whose :meth:`common_state` is given.

        The residuals stay this rank's own, but for ``memory="ef21"``, which begins anew.  See
        :class:`hvd_adaptive.torch.elastic.ElasticState`, which does this.
        """
        self._worker.rejoin(common)


def _tensor(array: Array) -> torch.Tensor:
    """What the core made, as a tensor in the same memory."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


def _tensors(state: Any) -> Any:
    """The same, of all that stands in dictionaries."""
    return (
        {key: _tensors(value) for key, value in state.items()} if isinstance(state, dict) else _tensor(state)
    )


def _bits(tensor: torch.Tensor) -> int:
    return 8 * tensor.element_size() * tensor.numel()
