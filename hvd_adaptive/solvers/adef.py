r"""ADEF: accelerated distributed optimisation with error feedback and compressed gradient
differences (arXiv 2503.08427; update as in papers.md 2.8).

Per worker, with g the gradient at y and g~ the tracked estimate that both ends know:

    D~ = C(g - g~),  g~ += D~,  delta = g - g~ - e / a,  D = C(delta),  e = a (D - delta)

and on every worker, with ghat = mean g~ + mean D and A the sum of the weights a so far:

    nu -= a ghat,  theta = (A theta + a nu) / (A + a),  y = (A' theta + a' nu) / (A' + a')

where a' and A' are those of the next round.  The weights a = (t + 1) / (2 L) are the choice for a general
convex objective; for a strongly convex one the method is restarted every ``restart`` rounds (a
choice of this package).  Two messages a round.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..core.compressors import Compressor
from .method import Method, Problem, require
from .network import Network


@dataclass(frozen=True)
class ADEFState:
    """``theta``, ``nu``: (d,).  ``tracked``, ``error``: (ranks here, d).  ``mean_tracked``: (d,).
    ``age``: rounds since the last restart."""

    theta: np.ndarray
    nu: np.ndarray
    tracked: np.ndarray
    mean_tracked: np.ndarray
    error: np.ndarray
    age: int


@dataclass(frozen=True)
class ADEF(Method):
    """smoothness: the L of the weights, in units of the objective's curvature.
    restart: rounds after which the momentum starts anew; None: never.  No composite part."""

    name: ClassVar[str] = "ADEF"

    smoothness: float
    compressor: Compressor
    restart: int | None = None

    def __post_init__(self) -> None:
        require(self, smoothness=(0, np.inf), restart=(0, np.inf))

    def start(self, problem: Problem, network: Network, x: np.ndarray) -> ADEFState:
        nothing = np.zeros((len(network.ranks), x.size))
        return ADEFState(x, x, nothing, np.zeros_like(x), nothing, 0)

    def step(self, problem: Problem, network: Network, state: ADEFState) -> ADEFState:
        theta, nu, error, age = state.theta, state.nu, state.error, state.age
        if age == self.restart:
            nu, error, age = theta, np.zeros_like(error), 0
        weight = (age + 1) / (2.0 * self.smoothness)
        before = age * (age + 1) / (4.0 * self.smoothness)  # the sum of the earlier weights
        y = (before * theta + weight * nu) / (before + weight)

        gradient = problem.gradients(y)
        moved, mean_moved = network.average(self.compressor, gradient - state.tracked)
        tracked, mean_tracked = state.tracked + moved, state.mean_tracked + mean_moved
        delta = gradient - tracked - error / weight
        sent, mean_sent = network.average(self.compressor, delta)
        nu = nu - weight * (mean_tracked + mean_sent)
        theta = (before * theta + weight * nu) / (before + weight)
        return ADEFState(theta, nu, tracked, mean_tracked, weight * (sent - delta), age + 1)

    def solution(self, state: ADEFState) -> np.ndarray:
        return state.theta

    def cautious(self) -> ADEF:
        return dataclasses.replace(self, smoothness=2 * self.smoothness)
