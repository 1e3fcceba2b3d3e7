"""Two levels for hosts with several ranks: dense inside a host, compressed between hosts.

    hvd.init(process_sets="dynamic")
    compression = Hierarchical("topk", model.named_parameters(), ratio=0.01)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        process_set=compression.inside,
    )

Horovod reduces each gradient densely over the ranks of the host, during the backward pass.  When the last
of a step has come back, one rank of each host, the speaker of :mod:`hvd_adaptive.core.hierarchy`, compresses
it with the speakers of the other hosts, and tells the result to its host.  Every rank does so in the
same order, whatever the order of its hooks.  Horovod's ``groups=`` works only in process sets that rank 0 is
in, so not here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .. import process_sets
from ..core import plans
from ..core.errors import ConfigurationError
from ..core.hierarchy import Hierarchy, speakers
from ..core.recipe import Recipe, given
from ..core.statistics import Statistics
from .compressor import Compressor
from .horovod import load
from .parameters import Parameters, refuse_adasum

_BROADCASTS = (torch.float16, torch.float32, torch.float64)
"""Horovod's broadcast takes these as they are; others go as bytes."""


class Hierarchical:
    """Compresses between hosts what their ranks have reduced densely.

    Pass it as ``compression=`` to ``hvd.DistributedOptimizer``, and its ``inside`` as ``process_set=``.

    Every rank must make it, at the same place in the program, after ``hvd.init(process_sets="dynamic")``.
    Residuals are kept by the speakers alone: a rank has those of the tensors that it speaks for.

    Raises ConfigurationError for one rank per host, unequal numbers of ranks, another ``op``, and where
    Horovod was started without dynamic process sets.

    Parameters
    ----------
    recipe: a :class:`~hvd_adaptive.core.recipe.Recipe`, or the name of one, with its ``options``.
    named_parameters: pairs of name and parameter, or a module.
    overrides: as for :class:`~hvd_adaptive.torch.Compressor`.
    op: the optimizer's: ``hvd.Average`` (the default) or ``hvd.Sum``.
    name: tells apart the collectives of several, where ranks do not make them in the same order.
    """

    def __init__(
        self,
        recipe: Recipe | str,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        overrides: Mapping[str, Any] | None = None,
        op: Any = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        hvd = load()
        self._op = hvd.Average if op is None else op
        if self._op not in (hvd.Average, hvd.Sum):
            raise ConfigurationError(f"op={op} must be hvd.Average or hvd.Sum, the optimizer's own")
        self._parameters = Parameters(named_parameters)
        choice = plans.choose(given(recipe, options), overrides, self._parameters.names)
        self._tag = plans.tag(name)
        local_rank = torch.tensor([hvd.local_rank()])
        local_ranks = hvd.allgather(local_rank, name=f"{self._tag}.hosts").tolist()
        self.hierarchy = Hierarchy.of(local_ranks)
        self.inside = process_sets.own("torch", self.hierarchy.inside)
        self.across = process_sets.own("torch", self.hierarchy.across)
        host, position = self.hierarchy.place(hvd.rank())
        self._speaker = list(speakers(self._parameters.dimensions, self.hierarchy.ranks_per_host).values())
        self._roots = [self.hierarchy.hosts[host][speaker] for speaker in self._speaker]
        own = [
            (name, tensor)
            for name, tensor, speaker in zip(
                self._parameters.names, self._parameters.tensors, self._speaker, strict=True
            )
            if speaker == position
        ]
        self._mine = {slot for slot, speaker in enumerate(self._speaker) if speaker == position}
        self._between = (
            Compressor(
                choice.recipe,
                own,
                overrides=choice.overriding([name for name, _ in own]),
                process_set=self.across,
                name=f"{self._tag}.between",
            )
            if own
            else None
        )
        process_sets.leave_together("torch", _meet)
        self._out = 0  # gradients that went out and have not come back
        self._back: dict[int, torch.Tensor] = {}  # the host's reductions of this step, by slot

    # -- Horovod's interface

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The gradient itself, for the dense reduction inside the host."""
        refuse_adasum(tensor)
        slot = self._parameters.slot(tensor)
        gradient = self._parameters.tensors[slot].grad
        if gradient is None or gradient.is_sparse:
            raise ConfigurationError(
                f"{self._parameters.names[slot]} has a sparse gradient, which hierarchical mode does not "
                "take: make its layer with sparse=False"
            )
        self._check(sys._getframe(1).f_locals.get("self"))
        self._out += 1
        # Horovod's allreduce knows no bfloat16, and wants its tensors contiguous.
        dense = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        return dense.contiguous(), (slot, tensor.dtype)

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The gradient reduced over all hosts; its values are there when the step's last has come back."""
        if ctx is None:
            raise ConfigurationError("a sparse gradient is reduced inside its host only: use sparse=False")
        slot, dtype = ctx
        reduced = tensor.to(dtype)
        self._back[slot] = reduced
        self._out -= 1
        if self._out == 0:
            with torch.no_grad():
                self._reduce_between()
            self._back.clear()
        return reduced

    def _reduce_between(self) -> None:
        """Between hosts and back to every rank of each, in place of what ``_back`` holds."""
        hvd = load()
        if len(self.hierarchy.hosts) == 1:
            return
        underway = []
        for slot in sorted(self._back):
            if slot in self._mine:
                assert self._between is not None
                gradient = self._parameters.tensors[slot].grad
                gradient.set_(self._back[slot])  # Horovod would do so after the last has come back
                ring, ticket = self._between.compress(gradient)
                handle = hvd.allreduce_async(
                    ring, name=f"{self._tag}.between.{slot}", op=self._op, process_set=self.across
                )
                underway.append((slot, handle, ticket))
        for slot, handle, ticket in underway:
            assert self._between is not None
            self._back[slot].copy_(self._between.decompress(hvd.synchronize(handle), ticket))
        told = [
            hvd.broadcast_async_(
                _wire(self._back[slot]),
                root_rank=self._roots[slot],
                name=f"{self._tag}.told.{slot}",
                process_set=self.inside,
            )
            for slot in sorted(self._back)
        ]
        for handle in told:
            hvd.synchronize(handle)

    def _check(self, optimizer: Any) -> None:
        """Raises ConfigurationError where Horovod's optimizer reduces in another way than we do."""
        given = getattr(optimizer, "process_set", self.inside)
        if given is not self.inside:
            raise ConfigurationError("give hvd.DistributedOptimizer process_set=compression.inside")
        if getattr(optimizer, "op", self._op) != self._op:
            raise ConfigurationError("give Hierarchical the op= that hvd.DistributedOptimizer has")

    # -- reports and checkpoints

    def statistics(self) -> Statistics | None:
        """What this rank sent between hosts; None where it speaks for no tensor."""
        return None if self._between is None else self._between.statistics()

    def residuals(self) -> dict[str, torch.Tensor]:
        """The residuals of the tensors that this rank speaks for."""
        return {} if self._between is None else self._between.residuals()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, for ``torch.save``: every rank saves its own."""
        return {} if self._between is None else self._between.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from :meth:`state_dict`, on as many hosts and ranks as before."""
        if self._between is not None:
            self._between.load_state_dict(state)


def _meet() -> None:
    load().allreduce(torch.zeros(1), name="hvd_adaptive.hierarchical.done")


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in _BROADCASTS else tensor.view(torch.uint8)
