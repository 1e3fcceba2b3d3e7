"""Which parameter a gradient belongs to: Horovod tells ``compress`` no name."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from ..core.errors import ConfigurationError, UnknownTensorError
from ..core.plans import check_names

CALLERS = 2
"""Calls from :meth:`Parameters.slot` up to Horovod: ``Compressor.compress`` is between."""


class Parameters:
    """Finds the slot (position in ``named_parameters``) of a gradient by identity.

    The gradient's own identity and address change from step to step, but while Horovod hands it to
    ``compress`` it is still its parameter's ``.grad``.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        if isinstance(named_parameters, torch.nn.Module):
            named_parameters = named_parameters.named_parameters()
        pairs = list(named_parameters)
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
                raise ConfigurationError(
                    "named_parameters must yield pairs (name, parameter), as model.named_parameters() "
                    f"does; it yielded a {type(pair).__name__}"
                )
        self.names = [name for name, _ in pairs]
        self.tensors = [tensor for _, tensor in pairs]
        check_names(self.names)
        self.dimensions = {name: tensor.numel() for name, tensor in pairs}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in pairs}
        self._expected = 0

    def slot(self, gradient: torch.Tensor) -> int:
        """The slot of a dense gradient.

        Raises UnknownTensorError for a tensor that is no known parameter's gradient.
        """
        count = len(self.tensors)
        for offset in range(count):  # hooks mostly fire in the same order, so look there first
            slot = (self._expected + offset) % count
            if self.tensors[slot].grad is gradient:
                return self._found(slot)
        # Horovod's sparse_as_dense makes a dense copy of the gradient of the parameter that it calls p.
        # Values alone would not tell apart two embeddings of one shape whose gradients are equal.
        caller = sys._getframe(CALLERS).f_locals.get("p")
        for slot, parameter in enumerate(self.tensors):
            sparse = parameter.grad
            if (
                parameter is caller
                and sparse is not None
                and sparse.is_sparse
                and sparse.shape == gradient.shape
            ):
                return self._found(slot)
        raise UnknownTensorError(
            f"a tensor of shape {tuple(gradient.shape)} is the gradient of none of the {count} parameters "
            "that this compressor was given; pass it the named_parameters() of every model whose "
            "gradients the optimizer reduces, and reduce other tensors without compression"
        )

    def _found(self, slot: int) -> int:
        # Backward passes go from the last parameter to the first.
        self._expected = (slot - 1) % len(self.tensors)
        return slot


def refuse_adasum(tensor: Any) -> None:
    """Raises ConfigurationError where Horovod's Adasum optimizer hands over a parameter's change."""
    if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
        raise ConfigurationError(
            "op=hvd.Adasum combines parameter changes in a way that no compressor here preserves; "
            "use op=hvd.Average or op=hvd.Sum, or leave compression out"
        )
