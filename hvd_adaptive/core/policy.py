"""How much to send: every policy turns what is to be compressed into a support.

A policy is a frozen object without state.  What changes from step to step arrives in
:class:`Control`, which all ranks hold alike.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from . import selection
from .backend import Array, Backend
from .cost import CostModel, LinkTime
from .errors import ConfigurationError
from .form import FEWEST, Trial
from .lowrank import LowRank


@dataclass(frozen=True)
class Control:
    """What is known at the start of a step.  Numbers, or scalar arrays where TensorFlow traces.

    All ranks hold the first three alike: ``step`` counts from 0, since the recipe was set, ``price``
    says how choosy to be (0: not known yet; its unit: :mod:`hvd_adaptive.core.price`), ``dense`` that
    everything is sent this step.  The times are this rank's own, in seconds: ``compute`` of a step
    without communication, ``sparse_time`` and ``dense_time`` of a whole step of either kind; 0 where
    they are not known.  ``support``: what all ranks send of this tensor, where that is known from the
    step before.  ``directions``: the tensor's, as :mod:`hvd_adaptive.core.lowrank` keeps them (None: those
    of the start), and ``used`` how many of them would be sent (None: to be reckoned).  ``trial``: how they
    have done, where coordinates could be sent instead.  ``first``: the ranks have not compared their
    settings yet, so every tensor is sent in the one form that does not depend on them, a ballot and a
    message that describes itself.
    """

    step: Any = 0
    price: Any = 0.0
    dense: Any = False
    compute: Any = 0.0
    sparse_time: Any = 0.0
    dense_time: Any = 0.0
    first: bool = False
    support: Any = None
    directions: Any = None
    used: Any = None
    trial: Trial = Trial()


def count(ratio: float, dimension: int) -> int:
    """T for a ratio: at least one coordinate."""
    return min(dimension, max(1, math.ceil(ratio * dimension)))


class Scanning(ABC):
    """A policy that sends what passes a threshold of magnitude, which it reads off a sample."""

    @abstractmethod
    def threshold(self, b: Backend, drawn: Array, dimension: int, control: Control) -> Array:
        """A float32 scalar, from the sample ``drawn`` of ``dimension`` coordinates."""

    @abstractmethod
    def chosen(self, b: Backend, x: Array, candidates: Array, control: Control) -> Array:
        """Those of the coordinates above the threshold (int64, ascending) that are sent."""

    def support(self, b: Backend, x: Array, control: Control) -> Array:
        """int64 indices, ascending, of the coordinates of ``x`` (float32, d elements) to send."""
        threshold = self.threshold(b, selection.sample(b, x), int(x.shape[0]), control)
        return self.chosen(b, x, selection.at_least(b, x, threshold), control)


@dataclass(frozen=True)
class Fixed(Scanning):
    """The same share of coordinates at every step.

    ``ratio``: T / d, in (0, 1].  ``exact``: exactly T coordinates, or about T by a threshold
    from a sample, which costs less.
    """

    ratio: float = 0.01
    exact: bool = True

    def __post_init__(self) -> None:
        _ratio("ratio", self.ratio)
        if not isinstance(self.exact, bool):
            raise ConfigurationError(f"exact must be True or False, not {self.exact!r}")

    def threshold(self, b: Backend, drawn: Array, dimension: int, control: Control) -> Array:
        return _threshold(self.exact)(b, drawn, dimension, count(self.ratio, dimension))

    def chosen(self, b: Backend, x: Array, candidates: Array, control: Control) -> Array:
        return _chosen(b, x, candidates, count(self.ratio, int(x.shape[0])), self.exact)


@dataclass(frozen=True)
class SharedRandom:
    """The same random coordinates on every rank (rand-k): no index is ever sent, and values ride
    Horovod's own allreduce.

    ``ratio``: T / d, in (0, 1].  ``seed``: with the step it decides the support.
    """

    ratio: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        _ratio("ratio", self.ratio)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise ConfigurationError(f"seed must be a whole number from 0 to 2**31 - 1, not {self.seed!r}")

    def support(self, b: Backend, x: Array, control: Control) -> Array:
        """int64 indices, in no order, of the coordinates of ``x`` (float32, d elements) to send."""
        dimension = int(x.shape[0])
        return selection.shared_random(b, x, dimension, count(self.ratio, dimension), self.seed, control.step)


MORE_DIRECTIONS = 3.0
"""Directions are worth so many times the time that coordinates would be: from 4 to 16 of them a training
saves 0.13 to 0.3 per cent of its steps for every per cent more, where coordinates around 1 % save 0.06."""


@dataclass(frozen=True)
class Adaptive(Scanning):
    """As many coordinates as pay for the time, or whatever else, that it costs to send them.

    ``cost``: a cost model; it is restated for the number of coordinates and the world size at
    hand.  ``family``: ``"sparsify"`` sends values, ``"sign"`` one magnitude and signs (the CAT
    paper's S and S+Q).  ``first_ratio``: T / d of the first step, before there is a price.
    ``measure``: the time of a step without communication is measured and added to the fixed cost.
    ``auto``: ``cost`` stands in for a link that is measured at the start.
    ``objective``: what a message is worth.  ``"energy"``: the squared gradient units that it takes
    away, as in the CAT paper; sent is what improves by more than the price.  ``"progress"``: the steps
    that it saves under mini-batch noise and error feedback, where most energy is noise and what is not
    sent is only late; sent is the same part of every tensor, its largest coordinates, as many as take
    the time that they save (:func:`hvd_adaptive.core.price.paced_price`), or, where ``share`` is given,
    as take that share of a step.
    """

    cost: CostModel
    family: str = "sparsify"
    first_ratio: float = 0.01
    measure: bool = False
    objective: str = "energy"
    share: float | None = None
    auto: bool = False
    lowrank: LowRank | None = None

    def __post_init__(self) -> None:
        _ratio("first_ratio", self.first_ratio)
        if not isinstance(self.cost, CostModel):
            raise ConfigurationError(
                "cost must be a cost model from hvd_adaptive.core.cost, such as LinkTime(PayloadBits(1), "
                f"bandwidth=1e9), not {self.cost!r}"
            )
        if self.family not in ("sparsify", "sign"):
            raise ConfigurationError(f"family must be 'sparsify' or 'sign', not {self.family!r}")
        if self.objective not in ("energy", "progress"):
            raise ConfigurationError(f"objective must be 'energy' or 'progress', not {self.objective!r}")
        share = 0.5 if self.share is None else self.share
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1:
            raise ConfigurationError(f"share must be above 0 and below 1, or None, not {self.share!r}")

    def marginal(self, dimension: int) -> float:
        """Cost of one more coordinate of a tensor of ``dimension``."""
        return self.cost.for_dimension(dimension).marginal()

    def threshold(self, b: Backend, drawn: Array, dimension: int, control: Control) -> Array:
        if self.objective == "progress":
            return selection.near_threshold(b, drawn, dimension, self.number(b, drawn, dimension, control))
        price = b.cast(b.constant(control.price, "float32", drawn), "float32")
        toll = price * self.marginal(dimension)
        return b.cond(
            toll > 0,
            lambda: self._priced(b, drawn, dimension, toll),
            lambda: selection.near_threshold(b, drawn, dimension, count(self.first_ratio, dimension)),
        )

    def chosen(self, b: Backend, x: Array, candidates: Array, control: Control) -> Array:
        return selection.some(b, x, candidates)

    def number(self, b: Backend, like: Array, dimension: int, control: Control) -> Array:
        """T, where progress is the objective: an int64 scalar."""
        one_in = b.cast(b.constant(control.price, "float64", like), "float64")
        one_in = b.where(one_in > 0, one_in, 1 / self.first_ratio)
        number = b.cast(dimension / one_in, "int64") + 1
        return b.minimum(number, b.constant(dimension, "int64", like))

    def used(self, b: Backend, like: Array, dimension: int, control: Control, bits: float) -> Array:
        """How many directions are sent, if any: an int64 scalar.  ``bits``: of a coordinate, position
        included."""
        low = self.lowrank
        assert low is not None
        coordinates = b.cast(self.number(b, like, dimension, control), "float64")
        number = b.cast(coordinates * MORE_DIRECTIONS / self._worth(bits), "int64")
        least = self.fewest if self.minor else 0
        number = b.where(number < least, b.constant(least, "int64", like), number)
        return b.minimum(number, b.constant(low.rank, "int64", like))

    def alternative(self, b: Backend, x: Array, used: Any, bits: float) -> Array:
        """About the squares of as many of the largest coordinates of ``x`` as cost what so many directions
        do, by a sample: a float32 scalar."""
        drawn, dimension = selection.sample(b, x), int(x.shape[0])
        number = b.cast(b.cast(b.constant(used, "float64", x), "float64") * self._worth(bits), "int64") + 1
        number = b.minimum(number, b.constant(dimension, "int64", x))
        largest = b.abs(drawn) >= selection.near_threshold(b, drawn, dimension, number)
        return b.sum(b.where(largest, drawn * drawn, 0.0)) * (dimension / int(drawn.shape[0]))

    @property
    def fewest(self) -> int:
        """The directions that a step must be able to afford."""
        assert self.lowrank is not None
        return min(FEWEST, self.lowrank.rank)

    @cached_property
    def minor(self) -> bool:
        """Whether the matrix is so small for the link that the fewest directions take no longer than an
        allgather of nothing, which any coordinate of it would need."""
        assert isinstance(self.cost, LinkTime)
        gather = dataclasses.replace(self.cost, collective="allgather", compute=0.0)
        return self.fewest * self.direction <= gather.fixed

    @cached_property
    def direction(self) -> float:
        """The time of a direction, in the mean of two steps: one sends a value per row, one per column."""
        low, cost = self.lowrank, self.cost
        assert low is not None and isinstance(cost, LinkTime)
        return 32 * low.matrix.per_rank * cost.ring(cost.payload).per_bit

    def _worth(self, bits: float) -> float:
        """Coordinates of so many bits that cost as much where they are gathered as a direction on a ring."""
        return self.direction / (bits * self._gathered)

    @cached_property
    def _gathered(self) -> float:
        """The time of a bit that is gathered."""
        assert isinstance(self.cost, LinkTime)
        return dataclasses.replace(self.cost, collective="allgather").per_bit

    def _priced(self, b: Backend, drawn: Array, dimension: int, toll: Array) -> Array:
        if self.family == "sparsify":  # a coordinate improves the objective by its square
            return b.sqrt(toll)
        # S+Q improves by ||x_T||_1^2 / T (papers' beta), which no threshold known beforehand maximises.
        ordered = b.sort(b.abs(drawn))
        size = b.length(ordered)
        each = dimension / size
        counts = b.cast(b.arange(size, drawn) + 1, "float32") * each
        norms = b.cumsum(ordered) * each
        return b.take(ordered, b.argmax(norms * norms / counts - toll * counts))


@dataclass(frozen=True)
class Warmup(Scanning):
    """Begins with a large share and narrows it geometrically to that of ``then``.

    The ratio is ``first_ratio ** (1 - t / steps) * ratio ** (t / steps)`` at step t < ``steps``,
    as Deep Gradient Compression's warm-up does per epoch; after that ``then`` decides alone.
    """

    then: Fixed | Adaptive
    steps: int = 100
    first_ratio: float = 0.25

    def __post_init__(self) -> None:
        _ratio("warmup_ratio", self.first_ratio)
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ConfigurationError(f"warmup_steps must be a whole number of at least 1, not {self.steps!r}")

    def counts(self, dimension: int) -> list[int]:
        """T at each step of the warm-up."""
        target = self.then.ratio if isinstance(self.then, Fixed) else self.then.first_ratio
        shares = (t / self.steps for t in range(self.steps))
        return [count(self.first_ratio ** (1 - s) * target**s, dimension) for s in shares]

    def threshold(self, b: Backend, drawn: Array, dimension: int, control: Control) -> Array:
        warm, now = self._now(b, drawn, dimension, control)
        return b.cond(
            warm,
            lambda: _threshold(self._exact)(b, drawn, dimension, now),
            lambda: self.then.threshold(b, drawn, dimension, control),
        )

    def chosen(self, b: Backend, x: Array, candidates: Array, control: Control) -> Array:
        warm, now = self._now(b, x, int(x.shape[0]), control)
        return b.cond(
            warm,
            lambda: _chosen(b, x, candidates, now, self._exact),
            lambda: self.then.chosen(b, x, candidates, control),
        )

    @property
    def _exact(self) -> bool:
        return not isinstance(self.then, Fixed) or self.then.exact

    def _now(self, b: Backend, like: Array, dimension: int, control: Control) -> tuple[Array, Array]:
        """Whether the warm-up lasts, and its T at this step."""
        step = b.constant(control.step, "int64", like)
        counts = b.constant(self.counts(dimension), "int64", like)
        last = b.constant(self.steps - 1, "int64", like)
        return step < self.steps, b.take(counts, b.reshape(b.minimum(step, last), (1,)))[0]


LEADERS = 4
"""Ranks that name a step's support together.  The best of several are better than many of one."""


@dataclass(frozen=True)
class Led:
    """The same coordinates on every rank, which a few of them have named a step ahead, in turn.

    In step t up to :data:`LEADERS` ranks say what step t + 1 sends: each what ``then`` would choose of its
    own gradient and residual, less what is sent now; of a fixed ratio, its part of it.  So only their
    indices travel, and values ride Horovod's own allreduce, however many ranks there are.  (That ranks
    choose for all in turn is ScaleCom's cyclic local top-k, Chen et al. 2020; here they do so one step
    earlier, so that nobody waits for it, and several at once.)

    ``auto``: only where it costs less; see :func:`hvd_adaptive.core.recipe.restate`.
    """

    then: Fixed | Adaptive | Warmup
    auto: bool = False

    @staticmethod
    def count(workers: int) -> int:
        """How many ranks lead a step."""
        return min(workers, LEADERS)

    def leads(self, position: int, workers: int, step: int) -> bool:
        """Whether the rank at ``position`` of so many leads a step."""
        return (position - step * self.count(workers)) % workers < self.count(workers)

    def support(self, b: Backend, x: Array, control: Control) -> Array:
        """int64 indices of what all ranks send now; at random where the step before named none."""
        if control.support is not None:
            return control.support
        if control.first or not isinstance(self.then, Adaptive):
            return self.then.support(b, x, control)
        dimension = int(x.shape[0])
        count = int(self.then.number(b, x, dimension, control))
        return selection.shared_random(b, x, dimension, count, 0, control.step)

    def following(self, b: Backend, x: Array, control: Control, workers: int) -> Array:
        """What this rank names for the next step, as one that leads this one."""
        parts, now = self.count(workers), self.support(b, x, control)
        rest = b.put(x, now, b.zeros(b.length(now), "float32", x))
        control = dataclasses.replace(control, price=control.price * parts)  # d / T, or so much choosier
        return _part(self.then, parts).support(b, rest, control)


def _part(policy: Fixed | Adaptive | Warmup, parts: int) -> Fixed | Adaptive | Warmup:
    """One of several equal parts of what ``policy`` sends; an adaptive one goes by its price."""
    if isinstance(policy, Fixed):
        return Fixed(policy.ratio / parts, policy.exact)
    if isinstance(policy, Warmup):
        then = _part(policy.then, parts)
        assert isinstance(then, (Fixed, Adaptive))
        return Warmup(then, policy.steps, policy.first_ratio / parts)
    return policy


def _threshold(exact: bool) -> Callable[[Backend, Array, int, Any], Array]:
    return selection.low_threshold if exact else selection.near_threshold


def _chosen(b: Backend, x: Array, candidates: Array, count: Any, exact: bool) -> Array:
    return selection.exactly(b, x, candidates, count) if exact else selection.some(b, x, candidates)


def sends_all(policy: Policy) -> bool:
    """Whether every coordinate is sent at every step, so that a message needs no index."""
    return isinstance(policy, Fixed) and policy.ratio >= 1


Policy = Fixed | SharedRandom | Adaptive | Warmup | Led | LowRank


def _ratio(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigurationError(
            f"{name} must be above 0 and at most 1 (a share of coordinates), not {value!r}"
        )
