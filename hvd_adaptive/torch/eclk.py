"""ECLK as a PyTorch optimizer for convex models; the update itself is `solvers.eclk`'s."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from ..core.compressors import Compressor, TopK
from ..core.errors import ConfigurationError
from ..solvers import theory
from ..solvers.eclk import ECLK, ECLKState, Schedule
from ..solvers.network import Cluster, Network
from ..solvers.problems import Smoothness
from ..solvers.ranks import HorovodRanks, launched
from ..solvers.run import DivergedError, DivergenceWarning


class ECLKOptimizer(torch.optim.Optimizer):
    r"""Error-compensated loopless Katyusha (arXiv 2010.00091) over Horovod ranks.

    ``step(closure)`` does one communication round.  The closure clears the gradients, computes the loss
    of *this rank's whole data* (its regulariser included), calls ``backward`` and returns the loss.
    It is called once a round, and once more in the rounds where the snapshot moves.  After ``step``
    the parameters hold the current answer.  Do not wrap it in ``hvd.DistributedOptimizer``: it does its own
    communication.  All ranks must start from the same parameters.

    What theory covers: a loss that is convex and L-smooth on every rank, ``strong_convexity`` mu > 0
    for the mean over ranks, deterministic closures.  Then the rate is linear and accelerated
    (papers: order ``1/delta + 1/p + sqrt(L1 / (mu p))`` rounds per digit) for any contraction delta.
    What it does not cover: non-convex models, dropout or mini-batches in the closure (the difference
    of two gradients then no longer vanishes at the optimum, and the method stalls at the noise), and
    L1 below ``theory.safe_L1``: the default, L1 = L, is what top-k mostly allows in practice, and a
    diverging run warns, doubles L1 and begins anew from its best point.

    Parameters
    ----------
    params: parameters or groups; all float, kept as one flat float64 vector inside.
    smoothness: L of the mean loss over ranks, regulariser included.
    strong_convexity: mu of the same.
    compressor: None: top-k with a tenth of the coordinates.
    p: probability that the snapshot moves; None: the compression ratio.
    snapshot: second compressor for the snapshot's gradient; None: dense messages.
    l1: weight of an l1 term, handled by its prox and not to be part of the closure.  The answer is
        a mean of points, so entries that are zero at the optimum are small, not exactly zero.
    network: None: the Horovod ranks where Horovod was initialised with several, else this process.
    seed: of the shared coin; the same on all ranks.
    check_every: rounds between checks of the loss over ranks.
    schedule: "coin", or "even" for a snapshot every 1 / p rounds (`solvers.eclk`).

    Raises :class:`ConfigurationError` for settings out of range, and ``step`` raises
    :class:`~hvd_adaptive.solvers.run.DivergedError` where the loss is not finite at the start or after 60
    doublings of L1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        smoothness: float,
        strong_convexity: float,
        compressor: Compressor | None = None,
        p: float | None = None,
        snapshot: Compressor | None = None,
        l1: float = 0.0,
        network: Network | None = None,
        seed: int = 0,
        check_every: int = 20,
        schedule: Schedule = "coin",
    ) -> None:
        super().__init__(params, {})
        if not 0 < strong_convexity <= smoothness < math.inf:
            raise ConfigurationError(
                f"strong_convexity={strong_convexity} and smoothness={smoothness} must satisfy 0 < mu <= L"
            )
        if l1 < 0 or check_every < 1:
            raise ConfigurationError(f"l1={l1} must be at least 0 and check_every={check_every} at least 1")
        self._flat = [one for group in self.param_groups for one in group["params"]]
        dimension = sum(one.numel() for one in self._flat)
        constants = Smoothness(smoothness, smoothness, smoothness, strong_convexity)
        compressor = compressor if compressor is not None else TopK(math.ceil(dimension / 10))
        self.method: ECLK = theory.eclk(
            constants, compressor, dimension, p, snapshot, L1=smoothness, schedule=schedule
        )
        if network is None:
            network = HorovodRanks(seed) if launched() else Cluster(1, seed)
        self.network = network
        self.network.agree(
            dimension=dimension, smoothness=smoothness, strong_convexity=strong_convexity, l1=l1, seed=seed
        )
        self.l1, self._check_every = l1, check_every
        self.rounds = self._rescues = 0
        self._now: ECLKState | None = None
        self._ceiling = self._best_loss = math.inf
        self._best = self._read()
        self._closure: Callable[[], Any] = lambda: None
        self._losses: list[float] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> float:
        """One round; returns this rank's loss at the point x where the gradient was taken."""
        self._closure = closure
        if self._now is None:
            self._now = self.method.start(self, self.network, self._read())
        self._losses.clear()
        x = self._now.x
        self._now = self.method.step(self, self.network, self._now)
        loss = self._losses[0]  # a second one, where the snapshot moved, is at the snapshot
        if self.rounds % self._check_every == 0:
            self._guard(x, loss)
        self.rounds += 1
        self._write(self.method.solution(self._now))
        return loss

    # -- what ECLK asks of a problem
    def gradients(self, x: np.ndarray) -> np.ndarray:
        """(1, d): this rank's gradient at x, by the closure."""
        self._write(x)
        with torch.enable_grad():
            loss = self._closure()
        self._losses.append(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))
        parts = (torch.zeros_like(one) if one.grad is None else one.grad for one in self._flat)
        return torch.cat([part.reshape(-1).to("cpu", torch.float64) for part in parts]).numpy()[None]

    def prox(self, v: np.ndarray, step: float) -> np.ndarray:
        """Soft thresholding, or nothing where l1 is 0."""
        if not self.l1:
            return v
        return np.sign(v) * np.maximum(np.abs(v) - step * self.l1, 0.0)

    def _guard(self, x: np.ndarray, loss: float) -> None:
        value = float(self.network.mean(np.array([[loss]]))[0]) + self.l1 * float(np.abs(x).sum())
        if math.isinf(self._ceiling):
            if not math.isfinite(value):
                raise DivergedError(
                    f"the loss at the starting point is {value}; check the closure and the data"
                )
            self._ceiling = 4.0 * value + 1e-300
        if not value <= self._ceiling:  # catches NaN too
            self._rescues += 1
            if self._rescues > 60:
                raise DivergedError("ECLK diverges however large L1; check the closure and the data's scale")
            self.method = self.method.cautious()
            warnings.warn(
                f"ECLK diverged at round {self.rounds}; it goes on from its best point with "
                f"L1={self.method.L1:g}",
                DivergenceWarning,
                stacklevel=3,
            )
            self._now = self.method.start(self, self.network, self._best)
        elif value < self._best_loss:
            self._best, self._best_loss = x, value

    # -- parameters as one vector
    def _read(self) -> np.ndarray:
        parts = [one.detach().reshape(-1).to("cpu", torch.float64) for one in self._flat]
        return torch.cat(parts).numpy().copy()

    def _write(self, x: np.ndarray) -> None:
        start = 0
        with torch.no_grad():
            for one in self._flat:
                part = torch.from_numpy(x[start : start + one.numel()]).reshape(one.shape)
                one.copy_(part)
                start += one.numel()

    # -- state
    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers only; a resumed run equals an uninterrupted one bit for bit."""
        now = {} if self._now is None else asdict(self._now)
        arrays = {name: torch.from_numpy(v.copy()) for name, v in now.items() if name != "age"}
        generators = (self.network.shared, *self.network.generators)
        numbers = {"rounds": self.rounds, "ceiling": self._ceiling, "best_loss": self._best_loss}
        numbers |= {"L1": self.method.L1, "bits_per_worker": self.network.bits_per_worker}
        return {
            "state": arrays | ({"age": now["age"]} if now else {}),
            "best": torch.from_numpy(self._best.copy()),
            "numbers": numbers,
            "generators": [one.bit_generator.state for one in generators],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict` of the same rank."""
        now = {
            n: v.numpy().copy() if isinstance(v, torch.Tensor) else v for n, v in state_dict["state"].items()
        }
        self._now = ECLKState(**now) if now else None
        self._best = state_dict["best"].numpy().copy()
        numbers = state_dict["numbers"]
        self.rounds, self._ceiling = numbers["rounds"], numbers["ceiling"]
        self._best_loss = numbers["best_loss"]
        while numbers["L1"] > self.method.L1:
            self.method = self.method.cautious()
        self.network.bits_per_worker = numbers["bits_per_worker"]
        for one, state in zip(
            (self.network.shared, *self.network.generators), state_dict["generators"], strict=True
        ):
            one.bit_generator.state = state
        if self._now is not None:
            self._write(self.method.solution(self._now))
