"""What every algorithm offers: a frozen description, an explicit state, and one round at a time."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np

from ..core.compressors import Compressor
from ..core.errors import ConfigurationError
from .network import Network

_Method = TypeVar("_Method", bound="Method")


class Problem(Protocol):
    """What an algorithm asks of the problem; `problems.LinearModel` offers it."""

    def gradients(self, x: np.ndarray) -> np.ndarray:
        """(workers here, d): the gradient of each worker's f at x."""

    def prox(self, v: np.ndarray, step: float) -> np.ndarray:
        """The proximal step of the part that every worker knows."""


@runtime_checkable
class BatchProblem(Problem, Protocol):
    """A problem of rows, as mini-batches need it."""

    @property
    def offsets(self) -> np.ndarray:
        """(workers here + 1,) row offsets of the shards."""

    def batch_gradients(self, x: np.ndarray, batches: Sequence[np.ndarray]) -> np.ndarray:
        """``gradients`` estimated from the given rows of each shard; x may hold a point per worker."""


class Method(ABC):
    """A frozen dataclass of parameters.  ``start`` and ``step`` take a state and return one; they
    draw random numbers from the network's generators and send through its ``average``."""

    name: ClassVar[str]

    @abstractmethod
    def start(self, problem: Problem, network: Network, x: np.ndarray) -> Any:
        """The state before round 0, at the point x (d,)."""

    @abstractmethod
    def step(self, problem: Problem, network: Network, state: Any) -> Any:
        """One round."""

    @abstractmethod
    def solution(self, state: Any) -> np.ndarray:
        """(d,): the current answer."""

    @abstractmethod
    def cautious(self: _Method) -> _Method:
        """The same method with its steps halved (or its L1 doubled)."""

    def parameters(self) -> dict[str, Any]:
        """The fields, with compressors written out, for reports."""
        found = {}
        for one in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            found[one.name] = str(value) if isinstance(value, Compressor) else value
        return found


def of_rows(problem: Problem) -> BatchProblem:
    """The problem, known to consist of rows; ConfigurationError where it does not."""
    if not isinstance(problem, BatchProblem):
        raise ConfigurationError(
            "batch needs a problem of rows, such as LogisticRegression; use batch=None here"
        )
    return problem


def draw_batches(problem: BatchProblem, network: Network, size: int) -> list[np.ndarray]:
    """``size`` rows of each shard here, uniformly with replacement."""
    shard_sizes = np.diff(problem.offsets)
    return [
        generator.integers(rows, size=size)
        for generator, rows in zip(network.generators, shard_sizes, strict=True)
    ]


def require(owner: object, **within: tuple[float, float]) -> None:
    """Each named field is a finite number in (low, high]; fields that are None are let through."""
    for name, (low, high) in within.items():
        value = getattr(owner, name)
        if value is None:
            continue
        if not (np.isreal(value) and np.isfinite(value) and low < value <= high):
            what = f"{type(owner).__name__}: {name}={value!r}"
            raise ConfigurationError(f"{what} must be a number above {low:g} and at most {high:g}")
