"""The experiment of the CAT paper: what a loss costs when every message is tuned, and when not.

Compressed gradient descent on a smooth problem, without memory: round after round every worker
sends Q_T of its gradient and all step by ``step_scale / L`` times the mean.  T is chosen by a
rule: the paper's (``tuned``), the same T always (``fixed``), the older cost-blind one for signs
(``dynamic``); ``full`` sends the gradient itself, without indices.  Rounds stop at a target
loss.  Source: the CAT paper (arXiv 2003.06377), its algorithm, cost models and baselines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.cost import CostModel, DenseBits, Payload, PayloadBits, SignPayloadBits
from ..core.efficiency import Choice, Curve, Family, at, best, compressed, curve, dynamic_sign_sparsity
from ..core.errors import ConfigurationError
from .problems import LinearModel

Floats = NDArray[np.float64]
MakeCost = Callable[[Payload], CostModel]
"""A cost model but for its payload, which the family of the message decides."""

RATIOS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""T / d of the fixed rules."""


def payload(family: Family, dimension: int, value_bits: float = 32) -> Payload:
    """The message length that a family is charged."""
    if family == "sign":
        return SignPayloadBits(dimension, value_bits)
    return PayloadBits(dimension, value_bits)


@dataclass(frozen=True)
class Trajectory:
    """``losses``: (rounds + 1,), from the start.  ``sparsities``: (rounds, workers), the chosen T.

    ``sent``: (rounds, workers), coordinates in the messages: T, or for the stochastic family what
    was drawn.
    """

    losses: Floats
    sparsities: Floats
    sent: Floats
    reached: bool

    @property
    def rounds(self) -> int:
        return len(self.sparsities)

    def charged(self, cost: CostModel) -> Floats:
        """(rounds + 1,): what a worker has spent so far, the mean over workers."""
        spent = cost(self.sent).mean(axis=1)
        return np.concatenate(([0.0], np.cumsum(spent)))


@dataclass(frozen=True)
class Run:
    """A trajectory under one cost model.

    ``rule``: ``tuned``, ``fixed``, ``dynamic`` or ``full``.  ``sparsity``: T of a fixed rule.
    ``spent``: (rounds + 1,), cumulative cost per worker.
    """

    family: Family
    rule: str
    sparsity: int | None
    cost_name: str
    cost: CostModel
    trajectory: Trajectory
    spent: Floats

    @property
    def name(self) -> str:
        return f"T = {self.sparsity}" if self.rule == "fixed" else self.rule

    def as_dict(self, points: int = 200) -> dict[str, Any]:
        """Numbers and strings alone; the history thinned to about ``points`` rounds."""
        trajectory = self.trajectory
        rounds = trajectory.rounds
        kept = np.unique(np.linspace(0, rounds, min(rounds + 1, points)).astype(int))
        sparsity = trajectory.sparsities.mean(axis=1)
        return {
            "family": self.family,
            "rule": self.rule,
            "sparsity": self.sparsity,
            "cost_model": self.cost_name,
            "unit": self.cost.unit,
            "reached": trajectory.reached,
            "iterations": rounds,
            "cost": float(self.spent[-1]),
            "final_loss": float(trajectory.losses[-1]),
            "mean_sparsity": float(trajectory.sparsities.mean()) if rounds else None,
            "least_sparsity": float(trajectory.sparsities.min()) if rounds else None,
            "most_sparsity": float(trajectory.sparsities.max()) if rounds else None,
            "history": {
                "iteration": kept.tolist(),
                "cost": self.spent[kept].tolist(),
                "loss": trajectory.losses[kept].tolist(),
                "sparsity": sparsity[kept[1:] - 1].tolist(),  # of the round that ended there
            },
        }


@dataclass(frozen=True)
class Curves:
    """Improvement, cost and efficiency against T for the gradient at the start, and the best T."""

    family: Family
    cost_name: str
    cost: CostModel
    curve: Curve
    best: Choice


@dataclass
class Experiment:
    """What to run.  ``costs``: cost models by name, each but for its payload.

    ``target_steps``: the target is the loss after that many steps of full gradient descent.
    ``cap``: the most rounds of a run.

    Raises ConfigurationError for settings out of range.
    """

    problem: LinearModel
    costs: Mapping[str, MakeCost]
    families: Sequence[Family] = ("sparsify", "sign", "stochastic")
    ratios: Sequence[float] = RATIOS
    target_steps: int = 300
    cap: int = 6000
    value_bits: float = 32
    seed: int = 0
    target: float = field(init=False)

    def __post_init__(self) -> None:
        for name in ("target_steps", "cap"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {getattr(self, name)}")
        for ratio in self.ratios:
            if not 0 < ratio <= 1:
                raise ConfigurationError(f"ratio must be above 0 and at most 1, not {ratio}")
        if self.problem.l1:
            raise ConfigurationError("l1 must be 0: the experiment is about smooth objectives")
        d = self.problem.dimension
        self.fixed = sorted({max(1, round(ratio * d)) for ratio in self.ratios})
        full = self.descend("sparsify", self._at(d), self.target_steps, -np.inf)
        self.target = float(full.losses[-1])

    def cost(self, name: str, family: Family) -> CostModel:
        return self.costs[name](payload(family, self.problem.dimension, self.value_bits))

    def curves(self) -> list[Curves]:
        g = self.problem.gradient(np.zeros(self.problem.dimension))
        found = []
        for family in self.families:
            for name in self.costs:
                cost = self.cost(name, family)
                found.append(Curves(family, name, cost, curve(g, cost, family), best(g, cost, family)))
        return found

    def jobs(self) -> list[tuple[str, Callable[[], list[Run]]]]:
        """Everything to run: a description, and a call that does it.

        Only the tuned rule looks at the cost, so any other trajectory serves every cost model.
        """
        d = self.problem.dimension
        jobs: list[tuple[str, Callable[[], list[Run]]]] = []

        def add(family: Family, rule: str, sparsity: int | None, name: str, choose: Any, costs: Any) -> None:
            def call() -> list[Run]:
                path = self.descend(family, choose)
                return [Run(family, rule, sparsity, n, c, path, path.charged(c)) for n, c in costs.items()]

            jobs.append((name, call))

        dense = {name: make(DenseBits(d, self.value_bits)) for name, make in self.costs.items()}
        add("sparsify", "full", None, "full gradient", self._at(d), dense)
        for family in self.families:
            costs = {name: self.cost(name, family) for name in self.costs}
            for name, cost in costs.items():
                add(family, "tuned", None, f"{family}, tuned to {name}", _tuned(cost, family), {name: cost})
            for sparsity in self.fixed:
                add(family, "fixed", sparsity, f"{family}, T = {sparsity}", self._at(sparsity, family), costs)
            if family == "sign":
                add(family, "dynamic", None, "sign, dynamic rule", self._dynamic, costs)
        return jobs

    def descend(
        self,
        family: Family,
        choose: Callable[[Floats], Choice],
        cap: int | None = None,
        target: float | None = None,
    ) -> Trajectory:
        """Compressed gradient descent from 0, until the target or the cap."""
        target = self.target if target is None else target
        generator = np.random.default_rng(self.seed)
        smoothness = self.problem.smoothness.mean
        x = np.zeros(self.problem.dimension)
        losses = [self.problem.loss(x)]
        sparsities: list[list[float]] = []
        sent: list[list[float]] = []
        while len(sparsities) < (cap or self.cap) and losses[-1] > target:
            gradients = self.problem.gradients(x)
            choices = [choose(g) for g in gradients]
            messages = [
                compressed(g, choice.sparsity, family, generator)
                for g, choice in zip(gradients, choices, strict=True)
            ]
            moves = [choice.step_scale * q for choice, q in zip(choices, messages, strict=True)]
            x = x - np.mean(moves, axis=0) / smoothness
            losses.append(self.problem.loss(x))
            sparsities.append([choice.sparsity for choice in choices])
            drawn = [float(np.count_nonzero(q)) for q in messages]
            sent.append(drawn if family == "stochastic" else sparsities[-1])
        shape = (-1, self.problem.workers)
        return Trajectory(
            np.array(losses),
            np.array(sparsities, dtype=np.float64).reshape(shape),
            np.array(sent, dtype=np.float64).reshape(shape),
            bool(losses[-1] <= target),
        )

    def _at(self, sparsity: int, family: Family = "sparsify") -> Callable[[Floats], Choice]:
        cost = payload(family, self.problem.dimension)
        return lambda g: at(g, cost, sparsity, family)

    def _dynamic(self, g: Floats) -> Choice:
        return self._at(dynamic_sign_sparsity(g), "sign")(g)


def _tuned(cost: CostModel, family: Family) -> Callable[[Floats], Choice]:
    return lambda g: best(g, cost, family)


@dataclass(frozen=True)
class Comparison:
    """The runs of one family under one cost model, side by side."""

    family: Family
    cost_name: str
    unit: str
    tuned: Run
    best_fixed: Run | None
    """The cheapest fixed T that reached the target."""
    dense: Run | None
    """Fixed T = d, where it was run."""
    dynamic: Run | None
    full: Run

    @property
    def quotient(self) -> float | None:
        """Cost of the tuned run over that of the best fixed T, where both reached the target."""
        if self.best_fixed is None or not self.tuned.trajectory.reached:
            return None
        return float(self.tuned.spent[-1] / self.best_fixed.spent[-1])


def compare(runs: Iterable[Run]) -> list[Comparison]:
    """One comparison per family and cost model, in the order of the tuned runs."""
    runs = list(runs)
    found = []
    for tuned in (run for run in runs if run.rule == "tuned"):
        here = [
            r
            for r in runs
            if r.cost_name == tuned.cost_name and (r.family == tuned.family or r.rule == "full")
        ]
        fixed = [r for r in here if r.rule == "fixed"]
        arrived = [r for r in fixed if r.trajectory.reached]
        dimension = tuned.cost.dimension
        found.append(
            Comparison(
                tuned.family,
                tuned.cost_name,
                tuned.cost.unit,
                tuned,
                min(arrived, key=lambda r: float(r.spent[-1]), default=None),
                next((r for r in fixed if r.sparsity == dimension), None),
                next((r for r in here if r.rule == "dynamic"), None),
                next(r for r in here if r.rule == "full"),
            )
        )
    return found
