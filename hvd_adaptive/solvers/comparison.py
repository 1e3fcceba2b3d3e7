"""The ECLK experiment: every method on one problem, each tuned, gap against rounds and bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.compressors import Compressor, Dithering, Natural, RandK, SignTopK, TopK, adaptive
from ..core.errors import ConfigurationError
from . import theory
from .ef21 import EF21
from .error_compensated import ErrorCompensated
from .method import Method
from .problems import LinearModel
from .run import History
from .tuning import Aim, Score, Settings, attempt, walk

FAMILIES = ("topk", "randk", "sign", "dithering", "natural", "adaptive")
HALVES = (2.0, 0.5)


def compressor_of(family: str, k: int, dimension: int, value: str) -> Compressor:
    """The compressor of that name; ``k`` is levels for dithering, and for ``adaptive`` the number of
    coordinates whose bits a round is charged beside its own."""
    makers: dict[str, Callable[[], Compressor]] = {
        "topk": lambda: TopK(k, value),
        "randk": lambda: RandK(k, value=value),
        "sign": lambda: SignTopK(k),
        "dithering": lambda: Dithering(k),
        "natural": Natural,
        "adaptive": lambda: adaptive(dimension, 32.0 * k, value),
    }
    if family not in makers:
        raise ConfigurationError(f"compressor={family!r} is unknown; use one of {', '.join(FAMILIES)}")
    return makers[family]()


@dataclass(frozen=True)
class Contestant:
    """A method to tune: how to build it from settings, where to start, and what to move."""

    label: str
    build: Callable[[Settings], Method]
    start: Settings = field(default_factory=dict)
    moves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    aim: Aim = "rounds"


@dataclass(frozen=True)
class Outcome:
    """A contestant's best run."""

    label: str
    method: Method
    history: History
    tried: int

    def record(self, least: float, targets: Sequence[float], compressor: str, k: int) -> dict[str, Any]:
        """As it goes into the JSON file; targets that were not reached are None."""
        hits = {
            f"{target:.0e}".replace("e-0", "e-"): self.history.first_below(target, least)
            for target in targets
        }
        return {
            "method": self.label,
            "compressor": compressor,
            "k": k,
            "rounds_to": {name: None if hit is None else hit[0] for name, hit in hits.items()},
            "bits_per_worker_to": {name: None if hit is None else hit[1] for name, hit in hits.items()},
            "best_gap": float(np.nanmin(self.history.gaps(least))),
            "parameters": self.method.parameters(),
            "runs_tried": self.tried,
        }


def contestants(problem: LinearModel, family: str, k: int, value: str) -> Iterator[Contestant]:
    """All methods.  Those with L1 start from L_f / 4, those with gamma from 2 / L_f,
    ADEF from L = L_f.

    ECLK with dense snapshots has p = r(Q) and is tuned (L1, theta1) for rounds, and uncompressed
    L-Katyusha has the same p.  ECLK with the second compressor has all its parameters tuned for bits.
    """
    constants, d = problem.smoothness, problem.dimension
    compressor = compressor_of(family, k, d, value)
    p = k / d if family in ("topk", "randk", "sign") else theory.ratio(compressor, d)
    p = min(1.0, p)
    one = {"L1": 0.25, "theta": 1.0}
    moves = {"L1": (0.5, 2.0), "theta": HALVES}

    def accelerated(quantizer: Compressor | None) -> Callable[[Settings], Method]:
        def build(s: Settings) -> Method:
            L1 = s["L1"] * constants.mean
            if quantizer is None:
                return theory.katyusha(constants, p, L1=L1, theta_scale=s["theta"])
            return theory.eclk(constants, quantizer, d, p, L1=L1, theta_scale=s["theta"])

        return build

    yield Contestant("GD", lambda s: theory.gradient_descent(constants))
    yield Contestant("AGD", lambda s: theory.accelerated_gradient_descent(constants))
    yield Contestant("L-Katyusha", accelerated(None), one, moves)
    yield Contestant("ECLK", accelerated(compressor), one, moves)
    yield second_compressor(problem, compressor, p, value, k)
    gamma, steps = {"scale": 2.0}, {"scale": HALVES}

    def step(s: Settings) -> float:
        return s["scale"] / constants.mean

    yield Contestant("EF21", lambda s: EF21(step(s), compressor), gamma, steps)
    yield Contestant("EC-GD", lambda s: ErrorCompensated(step(s), compressor), gamma, steps)
    shift = RandK(k, value=value) if family in ("topk", "randk", "sign", "adaptive") else compressor
    yield Contestant("EC-GD-DIANA", lambda s: ErrorCompensated(step(s), compressor, shift), gamma, steps)
    rows = problem.rows // problem.workers
    batch = max(1, rows // 20)
    yield Contestant(
        "EC-LSVRG-DIANA",
        lambda s: ErrorCompensated(step(s), compressor, shift, batch, batch / rows),
        gamma,
        steps,
    )
    delta = compressor.contraction(d)

    def with_gradient_differences(s: Settings) -> Method:
        method = theory.adef(constants, compressor, d, s["scale"] / delta**2)
        return dataclasses.replace(method, restart=max(2, round(s["restart"] * (method.restart or 2))))

    yield Contestant(
        "ADEF",
        with_gradient_differences,
        {"scale": 1.0, "restart": 1.0},
        {"scale": (4.0, 0.5), "restart": HALVES},
    )


def second_compressor(
    problem: LinearModel, compressor: Compressor, p: float, value: str, k: int, aim: Aim = "bits"
) -> Contestant:
    """ECLK whose shift follows by sparse messages of ``m`` times k coordinates after w moved."""
    constants, d = problem.smoothness, problem.dimension

    def build(s: Settings) -> Method:
        count = max(1, round(s["m"] * k))
        method = theory.eclk(
            constants, compressor, d, min(1.0, s["p"] * p), TopK(count, value), True,
            L1=s["L1"] * constants.mean, theta_scale=s["theta"], theta2=s["theta2"],
        )  # fmt: skip
        return dataclasses.replace(method, sigma1=s["sigma"] * method.sigma1)

    start = {"L1": 0.0625, "p": 8.0, "m": 4.0, "theta": 1.0, "theta2": 0.7, "sigma": 1.5}
    fine = (2**0.5, 2**-0.5)
    moves = {
        "L1": HALVES,
        "p": fine,
        "theta": fine,
        "m": (1.5, 2 / 3),
        "theta2": (1.15, 0.87),
        "sigma": HALVES,
    }
    return Contestant("ECLK second compressor", build, start, moves, aim)


def compete(
    contestant: Contestant,
    problem: LinearModel,
    rounds: int,
    target: float,
    seed: int = 0,
    budget: int = 40,
    watch: Callable[[int, Score], None] = lambda tried, best: None,
) -> Outcome:
    """Tune the contestant (or run it as it is where ``budget`` is 1)."""
    if not contestant.moves or budget == 1:
        result, _ = attempt(contestant.build(contestant.start), problem, rounds, target, seed=seed)
        return Outcome(contestant.label, result.method, result.history, 1)
    tuned = walk(
        contestant.build, contestant.start, contestant.moves, problem, rounds, target, contestant.aim,
        seed, budget, watch,
    )  # fmt: skip
    return Outcome(contestant.label, tuned.result.method, tuned.result.history, tuned.tried)
