"""Error-compensated gradient descent and its relatives, as one text (papers.md 2.7).

=================  =================  ==============  =====
name               gradient estimate  ``shift``       where it stalls
=================  =================  ==============  =====
EC-GD, EC-SGD      full, mini-batch   none            heterogeneity (and noise)
EC-LSVRG           LSVRG              none            heterogeneity
EC-GD-DIANA        full               learned         nowhere
EC-LSVRG-DIANA     LSVRG              learned         nowhere
=================  =================  ==============  =====

Source: Gorbunov, Kovalev, Makarenko, Richtarik (arXiv 2010.12292).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ..core.compressors import Compressor
from .method import Method, Problem, draw_batches, of_rows, require
from .network import Network


@dataclass(frozen=True)
class ECState:
    """``x``: (d,).  ``error``, ``shift``, ``anchor_gradient``: (ranks here, d).  ``anchors``: the
    LSVRG reference point of each worker here, (ranks here, d).  ``mean_shift``: (d,)."""

    x: np.ndarray
    error: np.ndarray
    shift: np.ndarray
    mean_shift: np.ndarray
    anchors: np.ndarray
    anchor_gradient: np.ndarray


@dataclass(frozen=True)
class ErrorCompensated(Method):
    """``v = C(error + gamma g)``, ``x <- x - mean v``, ``error <- error + gamma g - v``.

    gamma: step size.
    compressor: C.
    shift: the contraction by which DIANA's shift follows the gradient (alpha U with
        alpha = 1 / (1 + omega): the compressors' own contraction form); None: no shift.
    batch: rows per worker and round; None: full local gradients.
    p: with a batch, the probability that a worker renews its LSVRG reference point; None: plain
        mini-batches.
    """

    gamma: float
    compressor: Compressor
    shift: Compressor | None = None
    batch: int | None = None
    p: float | None = None

    def __post_init__(self) -> None:
        require(self, gamma=(0, np.inf), batch=(0, np.inf), p=(0, 1))

    @property
    def name(self) -> str:  # type: ignore[override]
        estimate = "GD" if self.batch is None else "SGD" if self.p is None else "LSVRG"
        return f"EC-{estimate}" + ("" if self.shift is None else "-DIANA")

    def start(self, problem: Problem, network: Network, x: np.ndarray) -> ECState:
        nothing = np.zeros((len(network.ranks), x.size))
        variance_reduced = self.batch is not None and self.p is not None
        return ECState(
            x, nothing, nothing, np.zeros_like(x), np.tile(x, (len(nothing), 1)),
            problem.gradients(x) if variance_reduced else nothing,
        )  # fmt: skip

    def step(self, problem: Problem, network: Network, state: ECState) -> ECState:
        x, anchors, anchor_gradient = state.x, state.anchors, state.anchor_gradient
        if self.batch is None:
            estimate = problem.gradients(x)
        else:
            batched = of_rows(problem)
            rows = draw_batches(batched, network, self.batch)
            estimate = batched.batch_gradients(x, rows)
            if self.p is not None:
                estimate = estimate - batched.batch_gradients(anchors, rows) + anchor_gradient
                renewed = np.array([generator.random() < self.p for generator in network.generators])
                if renewed.any():
                    anchors = np.where(renewed[:, None], x, anchors)
                    anchor_gradient = np.where(renewed[:, None], problem.gradients(x), anchor_gradient)
        target = state.error + self.gamma * (estimate - state.shift + state.mean_shift)
        sent, mean = network.average(self.compressor, target)
        shift, mean_shift = state.shift, state.mean_shift
        if self.shift is not None:
            learned, mean_learned = network.average(self.shift, estimate - shift)
            shift, mean_shift = shift + learned, mean_shift + mean_learned
        x = problem.prox(x - mean, self.gamma)
        return ECState(x, target - sent, shift, mean_shift, anchors, anchor_gradient)

    def solution(self, state: ECState) -> np.ndarray:
        return state.x

    def cautious(self) -> ErrorCompensated:
        return dataclasses.replace(self, gamma=self.gamma / 2)
