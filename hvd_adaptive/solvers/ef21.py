"""EF21 (Richtarik, Sokolov, Fatkhullin, NeurIPS 2021; papers.md 2.7): the baseline to beat."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..core.compressors import DENSE, Compressor
from .method import Method, Problem, require
from .network import Network


@dataclass(frozen=True)
class EF21State:
    """``x``: (d,).  ``estimate``: (ranks here, d), known to both ends.  ``mean``: (d,)."""

    x: np.ndarray
    estimate: np.ndarray
    mean: np.ndarray


@dataclass(frozen=True)
class EF21(Method):
    """``x <- x - gamma mean g``, ``g <- g + C(grad f(x) - g)``.

    gamma: step size.
    compressor: C.
    first: of the first g; the identity sends it as it is.  A sparse one bears far larger steps with top-k,
        since the coordinates then begin to move one after another.
    """

    name: ClassVar[str] = "EF21"

    gamma: float
    compressor: Compressor
    first: Compressor = DENSE

    def __post_init__(self) -> None:
        require(self, gamma=(0, np.inf))

    def start(self, problem: Problem, network: Network, x: np.ndarray) -> EF21State:
        sent, mean = network.average(self.first, problem.gradients(x))
        return EF21State(x, sent, mean)

    def step(self, problem: Problem, network: Network, state: EF21State) -> EF21State:
        x = problem.prox(state.x - self.gamma * state.mean, self.gamma)
        sent, mean = network.average(self.compressor, problem.gradients(x) - state.estimate)
        return EF21State(x, state.estimate + sent, state.mean + mean)

    def solution(self, state: EF21State) -> np.ndarray:
        return state.x

    def cautious(self) -> EF21:
        return dataclasses.replace(self, gamma=self.gamma / 2)
