"""Gradient descent and Nesterov's accelerated gradient descent, uncompressed (float32 messages)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ..core.compressors import DENSE, Compressor
from .method import Method, Problem, require
from .network import Network


@dataclass(frozen=True)
class GDState:
    """``x``, ``previous``: (d,)."""

    x: np.ndarray
    previous: np.ndarray


@dataclass(frozen=True)
class GradientDescent(Method):
    """``x <- prox(y - gamma grad f(y))`` with ``y = x + momentum (x - previous x)``.

    momentum = 0 is GD.  AGD for strongly convex f: gamma = 1/L_f and
    momentum = (sqrt(kappa) - 1) / (sqrt(kappa) + 1) (Nesterov's constant scheme).
    """

    gamma: float
    momentum: float = 0.0
    compressor: Compressor = DENSE

    def __post_init__(self) -> None:
        require(self, gamma=(0, np.inf), momentum=(-1e-12, 1))

    @property
    def name(self) -> str:  # type: ignore[override]
        return "AGD" if self.momentum else "GD"

    def start(self, problem: Problem, network: Network, x: np.ndarray) -> GDState:
        return GDState(x, x)

    def step(self, problem: Problem, network: Network, state: GDState) -> GDState:
        y = state.x + self.momentum * (state.x - state.previous)
        _, mean = network.average(self.compressor, problem.gradients(y))
        return GDState(problem.prox(y - self.gamma * mean, self.gamma), state.x)

    def solution(self, state: GDState) -> np.ndarray:
        return state.x

    def cautious(self) -> GradientDescent:
        return dataclasses.replace(self, gamma=self.gamma / 2)
