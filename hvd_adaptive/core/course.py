"""From one step to the next: the price, and whether the next step is dense.

The rule is :func:`follow`, on arrays, so that TensorFlow can trace it.  All ranks give it the same
ballots, and so go on alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .backend import Array, Backend
from .ballot import Tally
from .cost import DenseBits, LinkTime
from .numpy_backend import NUMPY
from .policy import Adaptive, Control
from .price import next_price, paced_price
from .recipe import Recipe

DENSE_STEPS = 50
"""Steps for which sending everything, decided by the cost model, stands before a sparse step is tried."""

MEASURED_STEPS = 200
"""The same, where measured times have decided it."""

TRIAL_STEPS = 4
"""Steps that are dense to learn what they take, where they might be the faster ones."""

REVIEW_STEPS = 500
"""Steps after which it is looked again whether dense ones might be faster."""

DENSE_SHARE = 0.1
"""Progress: everything is sent where that takes no more than this share of a step's modelled cost, and
no share is given.  Compression itself takes time, which cost models do not know."""

DENSE_WORTH = 1.25
"""Sparse steps that a dense one is taken to be worth.  A long training takes a tenth more of them, a short
one several times as many, and two measured times within a quarter of each other may be the same."""

LIKELY = 2.0
"""Dense steps are tried again where they took no more than so many times a sparse one."""

UNTRIED = 3.0
"""The same for the first time, when what they take is reckoned from the link alone: computation that
hides communication, or several ranks on the cores on which the link was measured, make it less."""


class Heading(NamedTuple):
    """What governs a step; float64 scalars.

    ``step``: of the model, from 0.  ``dense``: 1 where everything is sent, 0 elsewhere.  ``until``:
    the step at which a dense spell ends, or until which sparse steps are not called in question; 0
    where they may be at once.
    """

    step: Array
    price: Array
    dense: Array
    until: Array


class Totals(NamedTuple):
    """Of one step, over all tensors whose gradients were finite; float64 scalars, as in a ballot."""

    improvement: Array
    energy: Array
    fixed: Array
    variable: Array
    sparse_time: Array
    dense_time: Array


def follow(
    b: Backend, tuned: Adaptive, ring: Array, heading: Heading, totals: Totals
) -> tuple[Heading, Array]:
    """The heading of the next step, and what sending everything would improve per unit of cost.

    ``tuned``: restated for the model.  ``ring``: the cost of a dense step, :func:`ring_cost`.
    """
    step = heading.step + 1
    measured = totals.fixed - tuned.cost.fixed  # the time of a step, where it is measured
    whole = ring + b.where(measured > 0, measured, 0.0)
    if tuned.objective == "energy":
        price = next_price(b, heading.price, totals.improvement, totals.fixed + totals.variable)
        dense_price = totals.energy / whole
        pays = (dense_price >= price) & (heading.price > 0)
    else:
        sent = b.where(heading.price > 0, heading.price, 1 / tuned.first_ratio)
        rest = totals.sparse_time - totals.variable  # collectives wait for each other, and for their turn
        fixed = b.where(rest > totals.fixed, rest, totals.fixed)
        price = paced_price(b, sent, step, fixed, totals.variable, tuned.share)
        share = _dense_share(tuned)
        pays = ((whole - totals.fixed) * (1 - share) <= totals.fixed * share) & (totals.fixed > 0)
        dense_price = price * 0
    sparse_time, dense_time = totals.sparse_time, totals.dense_time
    known, timed = sparse_time > 0, (sparse_time > 0) & (dense_time > 0)
    at_once, due = heading.until <= 0, step >= heading.until
    likely = b.where(dense_time > 0, dense_time / LIKELY, whole / UNTRIED) <= sparse_time
    tried = known & likely & ((at_once & (timed == False)) | ((at_once == False) & due))  # noqa: E712
    decided = at_once & b.where(timed, dense_time <= DENSE_WORTH * sparse_time, pays)
    turns = (decided | tried) & (price > 0) & (totals.improvement > 0)
    zero = step * 0
    length = b.where(decided, b.where(timed, zero + MEASURED_STEPS, DENSE_STEPS), TRIAL_STEPS)
    later = b.where(timed & due, step + REVIEW_STEPS, heading.until)
    spell = heading.dense > 0
    stays = spell & (step < heading.until)
    following = Heading(
        step,
        b.where(spell, heading.price, price),
        b.where(spell, b.cast(stays, "float64"), b.cast(turns, "float64")),
        b.where(spell, b.where(stays, heading.until, 0.0), b.where(turns, step + length, later)),
    )
    return following, dense_price


def _dense_share(tuned: Adaptive) -> float:
    return DENSE_SHARE if tuned.share is None else tuned.share


def ring_cost(tuned: Adaptive, dimension: int) -> float:
    """The cost of a dense ring allreduce of so many coordinates; infinite where the cost model knows
    no ring."""
    if not isinstance(tuned.cost, LinkTime):
        return float("inf")
    return float(tuned.cost.ring(DenseBits(dimension))(dimension))


@dataclass(frozen=True)
class Course:
    """A heading as Python numbers, and why.

    ``control.step`` counts the steps of the whole model.  ``until``: the step at which a dense
    spell ends.  ``reason``: one sentence for ``statistics()``.
    """

    control: Control = Control()
    until: int = 0
    reason: str = "first step: no price yet"


def advance(recipe: Recipe, dimension: int, course: Course, tallies: Sequence[Tally]) -> Course:
    """The course of the next step, from the ballots of this one.

    ``recipe``: restated for the model; ``dimension``: of all its compressed tensors together.
    """
    before = course.control
    tuned = recipe.adaptive
    if tuned is None:
        return Course(dataclasses.replace(before, step=before.step + 1), 0, "a fixed recipe")
    usable = [t for t in tallies if not t.nonfinite]
    totals = Totals(*(np.float64(sum(getattr(t, name) for t in usable)) for name in Totals._fields))
    heading = Heading(*map(np.float64, (before.step, before.price, before.dense, course.until)))
    following, dense_price = follow(NUMPY, tuned, np.float64(ring_cost(tuned, dimension)), heading, totals)
    step, price, dense, until = (float(x) for x in following)
    control = dataclasses.replace(before, step=int(step), price=price, dense=bool(dense))
    if before.dense:
        reason = course.reason if dense else "a sparse step, to compare it with dense ones"
    else:
        reason = describe(tuned, price, bool(dense), float(dense_price), totals)
    return Course(control, int(until), reason)


def describe(tuned: Adaptive, price: float, dense: bool, dense_price: float, totals: Totals) -> str:
    """Why a step is dense or sparse."""
    sparse_time, dense_time = 1e3 * totals.sparse_time, 1e3 * totals.dense_time
    if sparse_time > 0 and dense_time > 0:
        kind = "dense" if dense else "sparse"
        return f"{kind}: a dense step takes {dense_time:.3g} ms and a sparse one {sparse_time:.3g} ms"
    if sparse_time > 0 and dense:
        return f"dense: to learn what dense steps take; a sparse one takes {sparse_time:.3g} ms"
    if tuned.objective == "progress":
        if dense:
            return f"dense: sending everything takes no more than {_dense_share(tuned):.0%} of a step"
        if tuned.share is not None:
            return f"sparse: communication is held at {tuned.share:.0%} of a step"
        return f"sparse: one coordinate in {price:.0f} is sent; more would take more time than they save"
    if dense:
        return (
            f"dense: everything improves by {dense_price:.3g} per {tuned.cost.unit}, "
            f"the best selection by {price:.3g}"
        )
    return f"sparse: the best selection improves by {price:.3g} per {tuned.cost.unit}"
