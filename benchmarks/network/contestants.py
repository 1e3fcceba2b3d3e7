"""Who takes part in the network benchmark, and how each is put into a training loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from hvd_adaptive.cli.report_runs import FORMAT
from hvd_adaptive.core.errors import ConfigurationError


@dataclass(frozen=True)
class Contestant:
    """One way to average gradients.

    ``launcher``: ``"horovod"`` (ranks of horovodrun) or ``"gloo"`` (PyTorch's own).  ``collective``: what
    carries most of its payload.  ``by_link``: what it sends depends on the link's speed, and so does its
    loss curve.
    """

    name: str
    label: str
    launcher: str
    collective: str = "allreduce"
    by_link: bool = False


_ALL = (
    Contestant("dense", "Horovod, dense", "horovod"),
    Contestant("fp16", "Horovod, fp16", "horovod"),
    Contestant("topk10", "top-k 10 %", "horovod", "allgather"),
    Contestant("topk1", "top-k 1 %", "horovod", "allgather"),
    Contestant("topk0.1", "top-k 0.1 %", "horovod", "allgather"),
    Contestant("lowrank4", "low rank, 4", "horovod"),
    Contestant("lowrank16", "low rank, 16", "horovod"),
    Contestant("adaptive", "adaptive", "horovod", "allgather", by_link=True),
    Contestant("calibrated", "adaptive, calibrated", "horovod", "allgather", by_link=True),
    Contestant("ddp", "DDP, dense", "gloo"),
    Contestant("ddp-fp16", "DDP, fp16", "gloo"),
    Contestant("ddp-bf16", "DDP, bf16", "gloo"),
    Contestant("powersgd1", "DDP, PowerSGD rank 1", "gloo"),
    Contestant("powersgd2", "DDP, PowerSGD rank 2", "gloo"),
    Contestant("powersgd4", "DDP, PowerSGD rank 4", "gloo"),
)
CONTESTANTS = {one.name: one for one in _ALL}

RATIOS = {"topk10": 0.1, "topk1": 0.01, "topk0.1": 0.001}
RANKS = {"lowrank4": 4, "lowrank16": 16}


def contestant(name: str) -> Contestant:
    """The contestant of that name; ConfigurationError naming the known ones otherwise."""
    if name not in CONTESTANTS:
        raise ConfigurationError(f"there is no contestant {name!r}; choose among {', '.join(CONTESTANTS)}")
    return CONTESTANTS[name]


def head(kind: str, task: str, one: Contestant, seed: int, ranks: int, rate: float | None) -> dict[str, Any]:
    """What identifies a run, as its file begins."""
    return {
        "format": FORMAT,
        "kind": kind,
        "task": task,
        "contestant": one.name,
        "label": one.label,
        "collective": one.collective,
        "by_link": one.by_link,
        "seed": seed,
        "ranks": ranks,
        "rate": rate,
    }


class Session(Protocol):
    """One model in training under one contestant."""

    model: nn.Module

    def step(self, loss: torch.Tensor) -> None:
        """Backward pass, averaging and update."""

    def spent(self) -> tuple[float, float]:
        """Seconds of compression and of decompression so far, on this rank."""

    def payload(self) -> int:
        """Bits that this rank has handed over to collectives so far."""

    def reason(self) -> str:
        """What an adaptive contestant says of its choice."""


class Group(Protocol):
    """The ranks of one launch."""

    rank: int
    size: int
    local_size: int

    def mean(self, values: Sequence[float]) -> list[float]:
        """Of each number, over the ranks; waits for all of them."""

    def session(self, name: str, model: nn.Module, optimizer: Any, calibrated: Path | None) -> Session:
        """Puts a contestant to work."""

    def close(self) -> None:
        """Leaves the group."""


# -- Horovod


class HorovodGroup:
    """Ranks started by horovodrun."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self.rank, self.size, self.local_size = hvd.rank(), hvd.size(), hvd.local_size()

    def mean(self, values: Sequence[float]) -> list[float]:
        import horovod.torch as hvd

        own = torch.tensor(values, dtype=torch.float64)
        return hvd.allreduce(own, name=f"mean.{len(values)}").tolist()

    def session(self, name: str, model: nn.Module, optimizer: Any, calibrated: Path | None) -> Session:
        return _Horovod(_compression(name, model, calibrated), model, optimizer)

    def close(self) -> None:
        import horovod.torch as hvd

        hvd.shutdown()


def _compression(name: str, model: nn.Module, calibrated: Path | None) -> Any:
    from hvd_adaptive.torch import Compression

    named = model.named_parameters()
    if name in RATIOS:
        return Compression.topk(named, ratio=RATIOS[name])
    if name in RANKS:
        return Compression.lowrank(named, rank=RANKS[name])
    if name == "adaptive":
        return Compression.adaptive(named)
    if name == "calibrated":
        if calibrated is None:
            raise ConfigurationError("the contestant 'calibrated' needs --calibrated FILE")
        return Compression.adaptive(named, cost=str(calibrated))
    return _Timed(getattr(Compression, {"dense": "none"}.get(name, name)))


class _Timed:
    """One of Horovod's own compressors, with a count of its seconds and bits."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.compress_seconds = self.decompress_seconds = 0.0
        self.bits = 0

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        began = time.perf_counter()
        sent, context = self._inner.compress(tensor)
        self.compress_seconds += time.perf_counter() - began
        self.bits += 8 * sent.element_size() * sent.numel()
        return sent, context

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        began = time.perf_counter()
        result = self._inner.decompress(tensor, context)
        self.decompress_seconds += time.perf_counter() - began
        return result


class _Horovod:
    def __init__(self, compression: Any, model: nn.Module, optimizer: Any) -> None:
        import horovod.torch as hvd

        self.model, self._compression = model, compression
        self._optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def step(self, loss: torch.Tensor) -> None:
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def spent(self) -> tuple[float, float]:
        report = self._report()
        return report.compress_seconds, report.decompress_seconds

    def payload(self) -> int:
        report = self._report()
        return int(report.bits if isinstance(report, _Timed) else report.bits_sent)

    def reason(self) -> str:
        return "" if isinstance(self._compression, _Timed) else str(self._compression.statistics().reason)

    def _report(self) -> Any:
        own = self._compression
        return own if isinstance(own, _Timed) else own.statistics().total


# -- PyTorch's DistributedDataParallel over Gloo


class GlooGroup:
    """Processes that know RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def mean(self, values: Sequence[float]) -> list[float]:
        import torch.distributed as dist

        own = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(own)
        return (own / self.size).tolist()

    def session(self, name: str, model: nn.Module, optimizer: Any, calibrated: Path | None) -> Session:
        return _DDP(name, model, optimizer)

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class _DDP:
    """The model in DDP, with a communication hook unless it is dense.

    ``spent`` counts the seconds inside of the hook's call.  What the hook leaves to be done when a
    collective has ended runs on Gloo's thread, so there are no seconds of decompression.
    """

    def __init__(self, name: str, model: nn.Module, optimizer: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel

        # The PowerSGD hook starts collectives from what Gloo's threads call when others have ended, so with
        # several buckets their order differs between ranks, and Gloo ends the processes.  One bucket is in
        # order; the models of the tasks have no buffers that training changes.
        buckets = {"bucket_cap_mb": 1024} if name.startswith("powersgd") else {}
        self.model = DistributedDataParallel(model, broadcast_buffers=False, **buckets)
        self._optimizer = optimizer
        self._dimension = sum(p.numel() for p in model.parameters())
        self._seconds, self._bits = 0.0, 0
        self._hooked = name != "ddp"
        if name in ("ddp-fp16", "ddp-bf16"):
            kind = name.removeprefix("ddp-")
            hook = getattr(default_hooks, f"{kind}_compress_hook")
            self._hook(None, hook, lambda bucket: 16 * bucket.buffer().numel())
        elif self._hooked:
            # 2 is the earliest that DDP permits; with the default, 1000, these runs would all be dense.
            rank = int(name.removeprefix("powersgd"))
            state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)

            def bits(bucket: Any) -> int:
                sent, self._low_rank = self._low_rank, int(state.compression_stats()[2])
                return 32 * ((self._low_rank - sent) or bucket.buffer().numel())

            self._low_rank = 0  # elements sent since PowerSGD has begun
            self._hook(state, powerSGD_hook, bits)

    def _hook(self, state: Any, hook: Callable[..., Any], bits: Callable[[Any], int]) -> None:
        def timed(state: Any, bucket: Any) -> Any:
            began = time.perf_counter()
            future = hook(state, bucket)
            self._seconds += time.perf_counter() - began
            self._bits += bits(bucket)
            return future

        # DDP looks at annotations, which `from __future__` makes strings, and refuses some hooks by name.
        timed.__annotations__, timed.__name__ = {}, hook.__name__
        self.model.register_comm_hook(state, timed)

    def step(self, loss: torch.Tensor) -> None:
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        if not self._hooked:
            self._bits += 32 * self._dimension

    def spent(self) -> tuple[float, float]:
        return self._seconds, 0.0

    def payload(self) -> int:
        return self._bits

    def reason(self) -> str:
        return ""


GROUPS: dict[str, Callable[[], Group]] = {"horovod": HorovodGroup, "gloo": GlooGroup}
