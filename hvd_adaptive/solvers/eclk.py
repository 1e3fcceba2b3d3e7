r"""ECLK: error-compensated loopless Katyusha (Qian, Richtarik, Zhang; arXiv 2010.00091).

Only the *difference* between the local gradient and a shift that both ends know is compressed.
The difference vanishes at the optimum, which is why the method converges exactly and linearly,
with the acceleration of Katyusha, under any contraction.

The shift follows the gradient at the snapshot w.  Two variants are one text here: ``snapshot``
is the compressor of ``grad f(w) - shift``, and ``refresh_only`` says whether that message is
sent in the rounds after w moved (with ``Identity`` this is the paper's dense message) or in every
round (a second sparse message; no bursts).

``schedule`` says when w moves: by a ``coin`` that shows heads with probability p (the paper's), or
``even``ly, every 1/p rounds, as the epochs of Katyusha (Allen-Zhu) do.  The proof is for the coin; even
spacing saves the long waits between two heads.

The same text with the identity as compressor is uncompressed L-Katyusha.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..core.compressors import DENSE, Compressor
from ..core.errors import ConfigurationError
from .method import Method, Problem, draw_batches, of_rows, require
from .network import Network

Schedule = Literal["coin", "even"]


@dataclass(frozen=True)
class ECLKState:
    """``x y z w``: (d,), the same on every worker.  ``error``, ``shift``, ``snapshot_gradient``:
    (ranks here, d).  ``mean_shift``: (d,), the mean of ``shift`` over all workers.
    ``age``: rounds since w moved; 0 where the shift does not follow it yet."""

    x: np.ndarray
    y: np.ndarray
    z: np.ndarray
    w: np.ndarray
    error: np.ndarray
    shift: np.ndarray
    mean_shift: np.ndarray
    snapshot_gradient: np.ndarray
    age: int


@dataclass(frozen=True)
class ECLK(Method):
    r"""Parameters as in papers.md 2.3; ``theory.eclk`` computes them.

    compressor: of ``(eta / L1) (gradient - shift) + error``.
    L1: smoothness constant with the compression error inside; the y-step is 1 / (3 L1).
    theta1, theta2: weights of z and w in x; theta1 + theta2 <= 1.
    sigma1: strong convexity over L1.
    p: probability that the snapshot moves, in (0, 1]; with even spacing it moves every round(1 / p) rounds.
    schedule: "coin" or "even".
    batch: rows per worker and round; None: the full local gradient.
    """

    name: ClassVar[str] = "ECLK"

    compressor: Compressor
    L1: float
    theta1: float
    sigma1: float
    p: float
    theta2: float = 0.5
    snapshot: Compressor = DENSE
    refresh_only: bool = True
    batch: int | None = None
    schedule: Schedule = "coin"

    def __post_init__(self) -> None:
        require(self, L1=(0, np.inf), theta1=(0, 1), p=(0, 1), theta2=(0, 1), batch=(0, np.inf))
        if self.schedule not in ("coin", "even"):
            raise ConfigurationError(f"ECLK: schedule={self.schedule!r} is unknown; use 'coin' or 'even'")

    @property
    def eta(self) -> float:
        """The z-step is eta / L1."""
        return 1.0 / (3.0 * self.theta1)

    def start(self, problem: Problem, network: Network, x: np.ndarray) -> ECLKState:
        nothing = np.zeros((len(network.ranks), x.size))
        return ECLKState(
            x=x, y=x, z=x, w=x, error=nothing, shift=nothing, mean_shift=np.zeros_like(x),
            snapshot_gradient=problem.gradients(x), age=0,
        )  # fmt: skip

    def step(self, problem: Problem, network: Network, state: ECLKState) -> ECLKState:
        x, y, z, w = state.x, state.y, state.z, state.w
        step, pull = self.eta / self.L1, self.eta * self.sigma1

        shift, mean_shift = state.shift, state.mean_shift
        if state.age == 0 or not self.refresh_only:
            sent, mean = network.average(self.snapshot, state.snapshot_gradient - shift)
            shift, mean_shift = shift + sent, mean_shift + mean

        if self.batch is None:
            gradient = problem.gradients(x)
        else:
            batched = of_rows(problem)
            rows = draw_batches(batched, network, self.batch)
            gradient = batched.batch_gradients(x, rows) - batched.batch_gradients(w, rows)
            gradient += state.snapshot_gradient
        target = step * (gradient - shift) + state.error
        sent, mean = network.average(self.compressor, target)

        if self.schedule == "even":
            moved = state.age + 1 >= round(1.0 / self.p)
        else:
            moved = bool(network.shared.random() < self.p)
        following = (pull * x + z - mean - step * mean_shift) / (1.0 + pull)
        following = problem.prox(following, step / (1.0 + pull))
        y_next = x + self.theta1 * (following - z)
        w = y if moved else w
        x = self.theta1 * following + self.theta2 * w + (1.0 - self.theta1 - self.theta2) * y_next
        return ECLKState(
            x=x, y=y_next, z=following, w=w, error=target - sent, shift=shift, mean_shift=mean_shift,
            snapshot_gradient=problem.gradients(w) if moved else state.snapshot_gradient,
            age=0 if moved else state.age + 1,
        )  # fmt: skip

    def solution(self, state: ECLKState) -> np.ndarray:
        return state.y

    def cautious(self) -> ECLK:
        """L1 doubled; theta1 and sigma1 follow as their formulas say."""
        return dataclasses.replace(
            self, L1=2 * self.L1, theta1=self.theta1 / np.sqrt(2.0), sigma1=self.sigma1 / 2
        )
