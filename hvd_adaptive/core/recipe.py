"""Named compositions of memory, policy, codec and transport, and the settings they take.

A recipe is a frozen object; two ranks may work together only if theirs are equal, which
:func:`fingerprint` lets them find out.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from . import link
from .cost import CostModel, LinkTime, PayloadBits, SignPayloadBits
from .errors import ConfigurationError
from .lowrank import LowRank
from .memory import ErrorFeedback, Memory, NoMemory, named
from .policy import Adaptive, Fixed, Led, Policy, SharedRandom, Warmup
from .values import KINDS, value_kind

DENSE_BELOW = 1024
"""Tensors of fewer elements go dense: a message of theirs would cost about as much in latency and
header as it saves."""

VECTORS = 16
"""Where matrices may be sent along directions, vectors go dense up to so many times as many elements as other
tensors: they are few beside the matrices that they belong to, and would need a collective of their own."""

DIRECTIONS = 24
"""The most that ``adaptive`` sends of a matrix: twice as many save 1 to 4 per cent of the steps, half as many
cost 13 (benchmarks/lowrank.py)."""

EVERYTHING = 1 << 62
"""More elements than a tensor has."""

DEFAULT_BANDWIDTH = 1e9
"""Bits per second of the link that ``adaptive`` assumes where it cannot measure one."""


@dataclass(frozen=True)
class Recipe:
    """What is done to a gradient between Horovod's ``compress`` and ``decompress``.

    ``memory``: what is carried over.  ``policy``: how much is sent.  ``values``: the kind of the
    sent values, one of :data:`hvd_adaptive.core.values.KINDS`.  ``dense_below``: tensors with fewer
    elements are left to Horovod as they are.
    """

    name: str
    policy: Policy
    memory: Memory = ErrorFeedback()
    values: str = "fp32"
    dense_below: int = DENSE_BELOW

    def __post_init__(self) -> None:
        if self.values not in KINDS:
            raise ConfigurationError(f"values must be one of {', '.join(sorted(KINDS))}, not {self.values!r}")
        if (
            isinstance(self.dense_below, bool)
            or not isinstance(self.dense_below, int)
            or self.dense_below < 0
        ):
            raise ConfigurationError(
                f"dense_below must be a number of elements, 0 or more, not {self.dense_below!r}"
            )
        if isinstance(self.policy, (SharedRandom, LowRank)) and self.values != "fp32":
            raise ConfigurationError(
                f"values must be 'fp32' for {self.name}: its values ride Horovod's allreduce in float32"
            )
        if isinstance(self.policy, LowRank) and not isinstance(self.memory, ErrorFeedback):
            raise ConfigurationError(f"memory must be 'error_feedback' or 'none' for {self.name}")

    @cached_property
    def shared(self) -> bool:
        """Whether all ranks send the same coordinates, so that values can be ring-allreduced."""
        return isinstance(self.policy, (SharedRandom, Led, LowRank))

    def fitted(self, shape: Sequence[int]) -> Recipe:
        """The recipe for a tensor of that shape: what is no matrix is not projected, and a short one not
        compressed."""
        tuned, low = self.adaptive, self.lowrank
        if low is None:
            return self
        fitted = low.fitted(shape)
        if tuned is not None:
            least = self.dense_below * (VECTORS if fitted is None else 1)
            tuned = dataclasses.replace(tuned, lowrank=fitted)
            return dataclasses.replace(self, policy=_with(self.policy, tuned), dense_below=least)
        if fitted is None:
            return dataclasses.replace(self, dense_below=EVERYTHING)
        return dataclasses.replace(self, policy=fitted)

    @cached_property
    def lowrank(self) -> LowRank | None:
        """The directions that are sent, always or where they do more than coordinates."""
        if isinstance(self.policy, LowRank):
            return self.policy
        return None if self.adaptive is None else self.adaptive.lowrank

    def spares(self, dimension: int) -> bool:
        """Whether a tensor of so many elements is too small to compress."""
        return dimension < max(1, self.dense_below)

    def leaves(self, dimension: int) -> bool:
        """Whether a tensor of so many elements is left to Horovod as it is."""
        return self.spares(dimension) and not self.memory.small

    def state_length(self, dimension: int) -> int:
        """Elements of the memory's state for a tensor of so many elements."""
        return 0 if self.leaves(dimension) else self.memory.width * dimension

    @cached_property
    def adaptive(self) -> Adaptive | None:
        """The tuning policy in this recipe, if there is one."""
        inner = self.policy
        while isinstance(inner, (Led, Warmup)):
            inner = inner.then
        return inner if isinstance(inner, Adaptive) else None


def fingerprint(*settings: Any) -> int:
    """32 bits that differ where settings (recipes, and what else has a telling ``repr``) do."""
    return int.from_bytes(hashlib.sha256(repr(settings).encode()).digest()[:4], "big")


def none() -> Recipe:
    """Nothing is compressed; for some of a model's tensors, or for some time."""
    return Recipe("none", Fixed(1.0), NoMemory(), dense_below=EVERYTHING)


def topk(
    ratio: float = 0.01,
    *,
    exact: bool = True,
    values: str = "fp32",
    memory: Memory | str | Mapping[str, Any] = "error_feedback",
    transport: str = "allgather",
    warmup_steps: int = 0,
    warmup_ratio: float = 0.25,
    dense_below: int = DENSE_BELOW,
) -> Recipe:
    """The largest magnitudes, ``ratio`` of each tensor's coordinates, with error feedback.

    ``exact``: exactly ceil(ratio d) coordinates; False reads the threshold off a sample.
    ``warmup_steps``: steps over which the ratio narrows from ``warmup_ratio`` to ``ratio``.
    ``memory``, of every recipe: what is carried over, a member of :mod:`hvd_adaptive.core.memory` as
    :func:`~hvd_adaptive.core.memory.named` takes it: ``"error_feedback"``, ``"momentum"``, ``"ef21"``,
    ``"none"``, or such as ``{"kind": "momentum", "momentum": 0.9, "clip": 1.0}``.
    ``transport``: ``"allgather"``, each rank sends the largest of its own; ``"ring"``, all send those
    that some of them have named (:class:`~hvd_adaptive.core.policy.Led`), as float32.
    """
    policy = _warmed(Fixed(_number("ratio", ratio), exact), warmup_steps, warmup_ratio)
    return Recipe("topk", _led(policy, transport), named(memory), values, dense_below)


def randk(
    ratio: float = 0.01,
    *,
    seed: int = 0,
    memory: Memory | str | Mapping[str, Any] = "error_feedback",
    dense_below: int = DENSE_BELOW,
) -> Recipe:
    """``ratio`` of each tensor's coordinates at random, the same on every rank, with error feedback."""
    policy = SharedRandom(_number("ratio", ratio), seed)
    return Recipe("randk", policy, named(memory), dense_below=dense_below)


def lowrank(
    rank: int = 4,
    *,
    memory: Memory | str | Mapping[str, Any] = "error_feedback",
    dense_below: int = DENSE_BELOW,
) -> Recipe:
    """``rank`` directions of each matrix, the same on every rank and learnt from step to step, with error
    feedback (:mod:`hvd_adaptive.core.lowrank`).  What is no matrix goes dense."""
    return Recipe("lowrank", LowRank(rank), named(memory), dense_below=dense_below)


def sign(
    ratio: float = 1.0,
    *,
    exact: bool = True,
    memory: Memory | str | Mapping[str, Any] = "error_feedback",
    warmup_steps: int = 0,
    warmup_ratio: float = 1.0,
    dense_below: int = DENSE_BELOW,
) -> Recipe:
    """Signs and one magnitude, mean |x| over the support: of every coordinate, or of the largest
    ``ratio`` of them (the S+Q of the CAT paper)."""
    policy = _warmed(Fixed(_number("ratio", ratio), exact), warmup_steps, warmup_ratio)
    return Recipe("sign", policy, named(memory), "sign", dense_below)


def adaptive(
    *,
    cost: CostModel | str = "auto",
    objective: str | None = None,
    share: float | None = None,
    family: str = "sparsify",
    values: str | None = None,
    first_ratio: float = 0.01,
    memory: Memory | str | Mapping[str, Any] = "error_feedback",
    transport: str | None = None,
    rank: int | None = None,
    warmup_steps: int = 0,
    warmup_ratio: float = 0.25,
    dense_below: int = DENSE_BELOW,
) -> Recipe:
    """At every step as many coordinates as pay for what it costs to send them.

    ``objective``: ``"energy"``, improvement per unit of cost as in the CAT paper, or ``"progress"``,
    time to the end of training, for mini-batches and error feedback (see
    :class:`hvd_adaptive.core.policy.Adaptive`).  The default is progress over a `LinkTime` and energy
    over any other cost.  ``share``: with progress, the share of a step to be spent on communication,
    instead of the one that the ratio calls for.

    ``cost``: ``"auto"``, which measures the link at the start; the path of a file that
    ``hvd-adaptive calibrate`` wrote; or any cost model.  Over a link the time of a step without
    communication is the fixed cost: measured, unless ``compute`` states it.
    The world size of a `LinkTime` is always the one at hand.  ``family``: ``"sparsify"`` sends
    ``values``, ``"sign"`` one magnitude and signs.  Values are ``"int4"`` for progress and ``"fp32"``
    for energy, unless they are given.

    ``transport``: as for :func:`topk`; ``"auto"``, the default for progress, takes the ring where so many
    ranks make it the cheaper one (:func:`restate`).

    ``rank``: the most directions of a matrix that are sent instead of coordinates, where they do more at
    the same cost (:mod:`hvd_adaptive.core.form`); 0: none are.  The default is 24 for progress with error
    feedback and no warm-up, and 0 elsewhere.
    """
    if objective is None:
        objective = "progress" if isinstance(cost, (str, LinkTime)) else "energy"
    if values is None:
        values = "sign" if family == "sign" else "int4" if objective == "progress" else "fp32"
    if (values == "sign") != (family == "sign"):
        raise ConfigurationError(
            f"values={values!r} does not fit family={family!r}: the family 'sign', and no other, has the "
            "values 'sign'"
        )
    auto = cost == "auto"
    if isinstance(cost, str):
        bits = value_kind(values).bits
        payload = SignPayloadBits(1) if family == "sign" else PayloadBits(1, value_bits=bits)
        cost = LinkTime(payload, bandwidth=DEFAULT_BANDWIDTH) if auto else link.load(cost).cost(payload)
    memory = named(memory)
    needed = {
        "objective='progress'": objective == "progress",
        "a cost that is a link's": isinstance(cost, LinkTime),
        "family='sparsify'": family == "sparsify",
        "memory='error_feedback'": type(memory) is ErrorFeedback,
        "no warm-up": not warmup_steps,
    }
    if rank is None:
        rank = DIRECTIONS if all(needed.values()) else 0
    elif isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ConfigurationError(f"rank must be a whole number, 0 for no directions, not {rank!r}")
    elif rank and not all(needed.values()):
        raise ConfigurationError(f"rank needs {next(what for what, holds in needed.items() if not holds)}")
    tuned = Adaptive(
        cost,
        family,
        _number("first_ratio", first_ratio),
        measure=isinstance(cost, LinkTime) and cost.compute == 0,
        objective=objective,
        share=share,
        auto=auto,
        lowrank=LowRank(rank) if rank else None,
    )
    policy = _warmed(tuned, warmup_steps, warmup_ratio)
    if transport is None:  # signs cannot be added up on a ring, and energy is that of each rank's own choice
        transport = "auto" if objective == "progress" and family != "sign" else "allgather"
    return Recipe("adaptive", _led(policy, transport), memory, values, dense_below)


RECIPES: Mapping[str, Callable[..., Recipe]] = {
    "none": none,
    "topk": topk,
    "randk": randk,
    "lowrank": lowrank,
    "sign": sign,
    "adaptive": adaptive,
}


def build(name: str, options: Mapping[str, Any]) -> Recipe:
    """The recipe of that name under these options.

    Raises ConfigurationError naming an unknown recipe or option and the nearest known one.
    """
    if name not in RECIPES:
        raise ConfigurationError(f"there is no recipe {name!r}{_nearest(name, RECIPES)}")
    maker = RECIPES[name]
    known = inspect.signature(maker).parameters
    for option in options:
        if option not in known:
            raise ConfigurationError(f"{name} takes no option {option!r}{_nearest(option, known)}")
    return maker(**options)


def given(recipe: Recipe | str, options: Mapping[str, Any]) -> Recipe:
    """A recipe as it is, or the one of that name under these options."""
    if not isinstance(recipe, Recipe):
        return build(recipe, options)
    if options:
        raise ConfigurationError(f"{min(options)} is an option of a recipe's name, not of a Recipe")
    return recipe


def from_config(config: Recipe | str | Mapping[str, Any]) -> Recipe:
    """A recipe as it is, from its name, or from a mapping ``{"recipe": name, option: value, ...}``."""
    if isinstance(config, Recipe):
        return config
    if isinstance(config, str):
        return build(config, {})
    if not isinstance(config, Mapping) or "recipe" not in config:
        raise ConfigurationError(f"config needs the key 'recipe', one of {', '.join(RECIPES)}")
    return build(config["recipe"], {k: v for k, v in config.items() if k != "recipe"})


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(str(name), list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else f"; it knows {', '.join(known)}"


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(f"{name} must be a number, not {value!r}")
    return float(value)


def _warmed(policy: Fixed | Adaptive, steps: int, first_ratio: float) -> Policy:
    return Warmup(policy, steps, _number("warmup_ratio", first_ratio)) if steps else policy


def _led(policy: Policy, transport: str) -> Policy:
    if transport not in ("allgather", "ring", "auto"):
        raise ConfigurationError(f"transport must be 'allgather', 'ring' or 'auto', not {transport!r}")
    if transport == "allgather":
        return policy
    assert isinstance(policy, (Fixed, Adaptive, Warmup))
    return Led(policy, auto=transport == "auto")


def restate(recipe: Recipe, dimension: int, world_size: int, measured: link.Link | None = None) -> Recipe:
    """The recipe with its cost model, if it has one, for a model of ``dimension`` coordinates
    trained by ``world_size`` workers, over the ``measured`` link where it was to be measured; and
    without the choice of a transport, which is made here."""
    tuned = recipe.adaptive
    if tuned is not None:
        cost = tuned.cost.for_dimension(dimension)
        if isinstance(cost, LinkTime):
            if tuned.auto and measured is not None:
                cost = measured.cost(cost.payload)
            cost = dataclasses.replace(cost, world_size=max(2, world_size))
        tuned = dataclasses.replace(tuned, cost=cost)
    policy = recipe.policy
    if isinstance(policy, Led) and policy.auto:
        value_bits = value_kind(recipe.values).bits
        rides = tuned is not None and _ring_pays(tuned.cost, value_bits)
        policy = Led(policy.then) if rides else policy.then
    if isinstance(policy, Led) and tuned is not None and isinstance(tuned.cost, LinkTime):
        tuned = dataclasses.replace(tuned, cost=tuned.cost.ring(tuned.cost.payload))
    return dataclasses.replace(recipe, policy=policy if tuned is None else _with(policy, tuned))


def _with(policy: Policy, tuned: Adaptive) -> Policy:
    """The policy with ``tuned`` at its heart."""
    if isinstance(policy, (Led, Warmup)):
        inner = _with(policy.then, tuned)
        return dataclasses.replace(policy, then=inner)  # type: ignore[arg-type]
    return tuned


RING_WORTH = 2.0
"""Of so many coordinates that are named for all ranks training makes as much as of one that every rank
chooses for itself."""

INDEX_BITS = 10
"""What an index takes after coding, about: its entropy at a ratio of 1 % is 8.1 bits, at 0.1 % 11.4."""


def _ring_pays(cost: CostModel, value_bits: int) -> bool:
    """Whether over a link a coordinate on the ring costs so much less than one that is gathered."""
    if not isinstance(cost, LinkTime):
        return False
    ring = cost.ring(cost.payload)
    gathered = (value_bits + INDEX_BITS) * cost.per_bit
    return RING_WORTH * (32 * ring.per_bit + INDEX_BITS / cost.bandwidth) < gathered
