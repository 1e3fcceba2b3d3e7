"""What the checks of the torch plug-in share; imported on the ranks only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn

from hvd_adaptive.core.cost import LinkTime, PayloadBits
from hvd_adaptive.torch import Compression, Compressor

LINK = LinkTime(PayloadBits(1), bandwidth=1e7, compute=0.01)  # a given time, so that no clock has a say

SETS: list[Any] = []  # the process sets of this run

RECIPES: dict[str, Callable[..., Compressor]] = {
    "topk": lambda p, **o: Compression.topk(p, 0.02, **o),
    "topk int8": lambda p, **o: Compression.topk(p, 0.02, values="int8", **o),
    "topk warm-up": lambda p, **o: Compression.topk(p, 0.02, warmup_steps=6, exact=False, **o),
    "topk ring": lambda p, **o: Compression.topk(p, 0.02, transport="ring", **o),
    "randk": lambda p, **o: Compression.randk(p, 0.1, **o),
    "lowrank": lambda p, **o: Compression.lowrank(p, 3, **o),
    "sign": lambda p, **o: Compression.sign(p, **o),
    "adaptive": lambda p, **o: Compression.adaptive(p, cost=LINK, **o),
    "adaptive ring": lambda p, **o: Compression.adaptive(p, cost=LINK, transport="ring", **o),
    "adaptive sign": lambda p, **o: Compression.adaptive(p, cost=LINK, family="sign", **o),
    "adaptive energy": lambda p, **o: Compression.adaptive(p, cost=LINK, objective="energy", **o),
}


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two large weights and two small biases."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 30)).to(dtype)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, **{"momentum": 0.9, **options})


def distributed(
    model: nn.Module, compression: Any, optimizer: Any = None, prefix: str = "", **options: Any
) -> Any:
    """``prefix``: of Horovod's names, where an earlier optimizer of equal names was left in the middle."""
    return hvd.DistributedOptimizer(
        optimizer or sgd(model),
        named_parameters=[(prefix + name, p) for name, p in model.named_parameters()],
        compression=compression,
        **options,
    )


class Batches:
    """Data of this rank's own, the same in every run."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self._generator = torch.Generator().manual_seed(1000 * seed + hvd.rank() + 1)
        self._dtype = dtype

    def loss(self, model: nn.Module, width: int = 40) -> torch.Tensor:
        x = torch.randn(8, width, generator=self._generator).to(self._dtype)
        return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()


def train(model: nn.Module, optimizer: Any, batches: Batches, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        batches.loss(model).backward()
        optimizer.step()


class Recording:
    """A compressor that also adds up what it was given and what it gave back, parameter by parameter."""

    def __init__(self, compressor: Compressor, model: nn.Module) -> None:
        self.inner = compressor
        self.parameters = dict(model.named_parameters())
        self.given = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self.parameters.items()}
        self.applied = {name: x.clone() for name, x in self.given.items()}
        self.calls = dict.fromkeys(self.given, 0)

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        (name,) = (name for name, p in self.parameters.items() if p.grad is tensor)
        self.given[name] += tensor.double()
        self.calls[name] += 1
        assert tensor.dtype == self.parameters[name].dtype
        ring, context = self.inner.compress(tensor)
        return ring, (name, context)

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        name, inner = context
        result = self.inner.decompress(tensor, inner)
        assert result.shape == self.given[name].shape and result.dtype == self.parameters[name].dtype
        self.applied[name] += result.double()
        return result

    def check(self, scale: float = 1.0, process_set: Any = None, rounding: float = 1e-5) -> None:
        """sum of applied = scale * mean over ranks of (sum of gradients - residual)."""
        process_set = process_set or hvd.global_process_set
        residuals = self.inner.residuals()
        assert any(float(r.abs().max()) > 0 for r in residuals.values())  # something is held back
        for name, given in self.given.items():
            residual = residuals.get(name, torch.zeros(given.numel())).double().view(given.shape)
            mean = hvd.allreduce(
                given - residual, name=f"check.{name}", op=hvd.Average, process_set=process_set
            )
            size = hvd.allreduce(given.abs().max(), name=f"size.{name}", op=hvd.Sum, process_set=process_set)
            torch.testing.assert_close(
                self.applied[name], scale * mean, rtol=0, atol=rounding * scale * (float(size) + 1e-6)
            )


def recorded(model: nn.Module, recipe: str = "topk", **options: Any) -> tuple[Recording, Compressor]:
    compressor = RECIPES[recipe](model.named_parameters(), **options)
    return Recording(compressor, model), compressor


def weights(model: nn.Module) -> list[np.ndarray[Any, Any]]:
    return [p.detach().double().numpy().copy() for p in model.parameters()]


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@contextlib.contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[None]:
    """This rank must raise an error of this kind whose text has all these words."""
    try:
        yield
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in: {error}"
    else:
        raise AssertionError(f"no {kind.__name__} on rank {hvd.rank()}")


def run(module: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """Runs the checks of those names; returns the names of those that passed, in order."""
    passed = []
    for name in names:
        print(f"check {name}", flush=True)
        module[name]()
        passed.append(name)
    return passed
