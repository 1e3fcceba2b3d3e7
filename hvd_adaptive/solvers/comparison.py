"""The ECLK experiment: every method on one problem, each tuned, gap against rounds and bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.compressors import Compressor, Dithering, Identity, Natural, RandK, SignTopK, TopK, adaptive
from ..core.errors import ConfigurationError
from . import theory
from .eclk import Schedule
from .ef21 import EF21
from .error_compensated import ErrorCompensated
from .method import Method
from .problems import LinearModel
from .run import History
from .tuning import Aim, Score, Settings, attempt, walk

FAMILIES = ("topk", "randk", "sign", "dithering", "natural", "adaptive")
HALVES = (2.0, 0.5)
ROOTS = (2**0.5, 2**-0.5)
STEPS = (*HALVES, 2**0.25, 2**-0.25, 2**0.0625, 2**-0.0625)


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
        """As it goes into the JSON file; targets that were not reached are None.  ``diverged``: the run ended
        that way, which of a tuned method's best run says that all did."""
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
            "diverged": self.history.diverged,
            "parameters": self.method.parameters(),
            "runs_tried": self.tried,
        }


def contestants(
    problem: LinearModel,
    family: str,
    k: int,
    value: str,
    p: float | None = None,
    schedule: Schedule = "even",
) -> Iterator[Contestant]:
    """All methods.  Those with L1 start from L_f / 8, those with gamma from 2.5 / L_f,
    ADEF from L = L_f.

    Uncompressed L-Katyusha and ECLK with dense snapshots have the same ``p`` (None: the share of
    coordinates that are sent, or of bits) and are tuned
    alike, in L1, theta1 and sigma1, for rounds.  ECLK with the second compressor has all its parameters
    tuned for bits.  EF21 starts from the gradient as it is (its paper's), or from a compressed one.
    """
    constants, d = problem.smoothness, problem.dimension
    compressor = compressor_of(family, k, d, value)
    if p is None:
        p = min(1.0, k / d) if family in ("topk", "randk", "sign") else theory.ratio(compressor, d)
    one = {"L1": 0.125, "theta": 1.0, "sigma": 1.0}
    moves = {"L1": (*HALVES, *ROOTS), "theta": ROOTS, "sigma": ROOTS}

    def accelerated(quantizer: Compressor) -> Callable[[Settings], Method]:
        def build(s: Settings) -> Method:
            method = theory.eclk(
                constants, quantizer, d, p, L1=s["L1"] * constants.mean, theta_scale=s["theta"],
                schedule=schedule,
            )  # fmt: skip
            return dataclasses.replace(method, sigma1=s["sigma"] * method.sigma1)

        return build

    yield Contestant("GD", lambda s: theory.gradient_descent(constants))
    yield Contestant("AGD", lambda s: theory.accelerated_gradient_descent(constants))
    yield Contestant("L-Katyusha", accelerated(Identity()), one, moves)
    yield Contestant("ECLK", accelerated(compressor), one, moves)
    yield second_compressor(problem, compressor, value, k, schedule)
    gamma, steps = {"scale": 2.5}, {"scale": STEPS}

    def step(s: Settings) -> float:
        return s["scale"] / constants.mean

    yield Contestant("EF21", lambda s: EF21(step(s), compressor), gamma, steps)
    yield Contestant(
        "EF21 compressed start", lambda s: EF21(step(s), compressor, compressor), gamma, steps, "bits"
    )
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
    problem: LinearModel, compressor: Compressor, value: str, k: int, schedule: Schedule = "even"
) -> Contestant:
    """ECLK whose shift follows by sparse messages of ``m`` times k coordinates after w moved, which it does
    about every ``d / (p k)`` rounds."""
    constants, d = problem.smoothness, problem.dimension

    def build(s: Settings) -> Method:
        count = max(1, round(s["m"] * k))
        method = theory.eclk(
            constants, compressor, d, min(1.0, s["p"] * min(k, d) / d), TopK(count, value), True,
            L1=s["L1"] * constants.mean, theta_scale=s["theta"], theta2=s["theta2"],
            schedule=schedule,
        )  # fmt: skip
        return dataclasses.replace(method, sigma1=s["sigma"] * method.sigma1)

    start = {"L1": 0.03, "p": 11.2, "m": 5.0, "theta": 2.5, "theta2": 0.47, "sigma": 1.0}
    moves = {
        "L1": (*HALVES, *ROOTS, 2**0.125, 2**-0.125),
        "p": ROOTS,
        "theta": (*ROOTS, 2**0.125, 2**-0.125),
        "m": (1.25, 0.8),
        "theta2": (1.15, 0.87),
        "sigma": ROOTS,
    }
    return Contestant("ECLK second compressor", build, start, moves, "bits")


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
