"""From one step to the next: the price, and whether the next step is dense.

All ranks call :func:`advance` with the same ballots, and so go on alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from .ballot import Tally
from .cost import DenseBits, LinkTime
from .policy import Adaptive, Control
from .price import next_price
from .recipe import Recipe

DENSE_STEPS = 50
"""Steps for which a decision to send everything stands before a sparse step is tried again."""


@dataclass(frozen=True)
class Course:
    """What the ranks hold alike between steps, and why.

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
    step = course.control.step + 1
    control = dataclasses.replace(course.control, step=step)
    tuned = recipe.adaptive
    if tuned is None:
        return Course(control, 0, "a fixed recipe")
    if course.control.dense:
        if step < course.until:
            return dataclasses.replace(course, control=control)
        control = dataclasses.replace(control, dense=False)
        return Course(control, 0, "a sparse step, to compare it with dense ones")
    price = next_price(course.control.price, tallies)
    control = dataclasses.replace(control, price=price)
    dense_price = _dense_price(tuned, dimension, tallies)
    if dense_price is not None and course.control.price > 0 and dense_price >= price > 0:
        control = dataclasses.replace(control, dense=True)
        reason = (
            f"dense: everything improves by {dense_price:.3g} per {tuned.cost.unit}, "
            f"the best selection by {price:.3g}"
        )
        return Course(control, step + DENSE_STEPS, reason)
    return Course(control, 0, f"sparse: the best selection improves by {price:.3g} per {tuned.cost.unit}")


def _dense_price(tuned: Adaptive, dimension: int, tallies: Sequence[Tally]) -> float | None:
    """Improvement per cost of a dense ring allreduce; None where the cost model knows no ring."""
    cost = tuned.cost
    if not isinstance(cost, LinkTime):
        return None
    ring = dataclasses.replace(cost, payload=DenseBits(dimension), collective="allreduce")
    sent = sum(t.improvement for t in tallies)
    if not sent > 0:
        return None
    measured = sum(t.fixed for t in tallies) - cost.fixed  # the time of a step, where it is measured
    return sum(t.energy for t in tallies) / (max(0.0, measured) + float(ring(dimension)))
