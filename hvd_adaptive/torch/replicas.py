"""Whether all ranks hold the same model, bit for bit: what compression must never change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from ..core.errors import HvdAdaptiveError
from .horovod import load


class ReplicasDifferError(HvdAdaptiveError, AssertionError):
    """The ranks' models differ; the message names the first tensor that does."""


def assert_replicas_equal(model: Any, *, process_set: Any = None, name: str = "replicas") -> None:
    """Raises ReplicasDifferError, on every rank, unless all ranks hold the same bits.

    Every rank must call it.  It sends one hash per tensor.

    Parameters
    ----------
    model: a module (its parameters and buffers) or a state such as ``model.state_dict()`` or
        ``optimizer.state_dict()``: mappings and sequences, however deep, of tensors and plain values.
    process_set: whose ranks are compared; all by default.
    name: tells apart the collectives of calls that may overlap.
    """
    hvd = load()
    process_set = process_set or hvd.global_process_set
    state = model.state_dict() if isinstance(model, torch.nn.Module) else model
    own = [(key, _digest(value)) for key, value in _leaves("", state)]
    everyone = _gather(own, f"hvd_adaptive.{name}", process_set)
    ranks = list(process_set.ranks) if process_set.process_set_id else list(range(hvd.size()))
    for rank, other in zip(ranks[1:], everyone[1:], strict=True):
        for (key, digest), (other_key, other_digest) in zip(everyone[0], other, strict=False):
            if key != other_key:
                raise ReplicasDifferError(f"rank {ranks[0]} has {key!r} where rank {rank} has {other_key!r}")
            if digest != other_digest:
                raise ReplicasDifferError(
                    f"{key!r} differs between rank {ranks[0]} and rank {rank}; were all ranks started alike "
                    "(hvd.broadcast_parameters, hvd.broadcast_optimizer_state), and is every parameter "
                    "changed through the same optimizer?"
                )
        if len(everyone[0]) != len(other):
            raise ReplicasDifferError(
                f"rank {ranks[0]} has {len(everyone[0])} tensors and rank {rank} has {len(other)}"
            )


def _gather(value: Any, name: str, process_set: Any) -> list[Any]:
    """Every rank's ``value`` (of what JSON knows), in rank order; Horovod's own knows no process set."""
    hvd = load()
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([own.numel()], dtype=torch.int64)
    lengths = hvd.allgather(length, name=f"{name}.lengths", process_set=process_set).tolist()
    everyone = hvd.allgather(own, name=name, process_set=process_set).split(lengths)
    return [json.loads(bytes(part.numpy())) for part in everyone]


def _leaves(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        return [(path, value)]
    return [leaf for key, child in items for leaf in _leaves(f"{path}.{key}" if path else str(key), child)]


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy() if value.numel() else b"")
    else:
        digest.update(repr(value).encode())
    return digest.hexdigest()
