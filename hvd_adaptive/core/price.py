"""One scalar price that tunes every tensor of every worker.

The rule of the CAT paper maximises improvement / cost.  Over many tensors and workers that is a
fractional programme, and Dinkelbach's method solves it: at price p send whatever improves by more
than p times its cost; the next price is the total improvement over the total cost.  From below the
optimum the price climbs to it monotonically and superlinearly; one step of training makes one step
of it, so the price follows the gradients as they change.
"""

from __future__ import annotations

from .backend import Array, Backend

GREATEST_CHANGE = 4.0
"""A step changes the price by no more than this factor, either way."""

GREATEST_PRICE = 16.0
"""A steered price exceeds the mean improvement per cost of what is sent by no more than this factor."""

_KEPT = 8  # significant bits of a price


def next_price(b: Backend, price: Array, improvement: Array, cost: Array) -> Array:
    """The price of the next step (improvement per unit of cost) from the totals of this one.

    ``price``: this step's, or 0 where none is known yet.  A step in which nothing improved leaves
    it as it is.  All are float64 scalars.
    """
    known = (improvement > 0) & (improvement < float("inf")) & (cost > 0)
    found = improvement / b.where(known, cost, 1.0)
    return b.where(known, _snap(b, b.where(price > 0, _bounded(b, found, price), found)), price)


def steered_price(b: Backend, price: Array, improvement: Array, variable: Array, budget: Array) -> Array:
    """The price at which the next step costs about ``budget`` on top of its fixed part.

    ``variable``: what this step cost on top, at ``price``.  T falls with the price by a power that
    differs between heavy and light tails, so a step only makes up for part of the distance.  The
    first price is that of a typical coordinate among those of the first step.

    Where even the least that can be sent is beyond the budget, the price would rise without end, and
    be of no use when gradients grow again; so it stays within reach of what is sent.
    """
    known = (improvement > 0) & (improvement < float("inf")) & (variable > 0) & (budget > 0)
    excess = b.where(known, variable, 1.0) / b.where(known, budget, 1.0)
    mean = improvement / b.where(known, variable, 1.0)
    found = b.where(price > 0, price, 0.25 * mean) * b.sqrt(excess)
    found = b.minimum(found, GREATEST_PRICE * mean)
    return b.where(known, _snap(b, b.where(price > 0, _bounded(b, found, price), found)), price)


def _bounded(b: Backend, found: Array, price: Array) -> Array:
    least, most = price / GREATEST_CHANGE, price * GREATEST_CHANGE
    return 0 - b.minimum(0 - b.minimum(found, most), 0 - least)


def _snap(b: Backend, value: Array) -> Array:
    """Few significant bits: ballots are summed in an order that is Horovod's own affair, and the
    last bit of a float32 sum must not decide which coordinates are sent."""
    dropped = 53 - _KEPT
    bits = b.bitcast(value, "int64") + (1 << (dropped - 1))
    return b.bitcast(b.shift_left(b.shift_right(bits, dropped), dropped), "float64")
