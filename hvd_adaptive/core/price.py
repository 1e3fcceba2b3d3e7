"""One scalar price that tunes every tensor of every worker.

What it counts depends on the objective.  For ``"energy"`` it is improvement per unit of cost, and
:func:`next_price` makes it.  For ``"progress"`` it is d / T, so that one coordinate in so many is sent,
and :func:`paced_price` makes it.

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

RATIO = 0.003
"""A ratio T / d in the middle of those that matter, and ..."""

ELASTICITY = 0.2
"""... the elasticity -d ln steps / d ln T there: one per cent more coordinates saves so many per cent of
the steps of training.  It falls as the ratio grows."""

EARLY = 10.0
"""At step t the elasticity is greater by the factor ``1 + EARLY / t``: residuals have to fill first."""

GREATEST_TIME = 0.5
"""Communication never takes more than so many times the rest of a step, unless the user says so."""

LEAST_RATIO = 1e-6

_KEPT = 8  # significant bits of a price


def next_price(b: Backend, price: Array, improvement: Array, cost: Array) -> Array:
    """The price of the next step (improvement per unit of cost) from the totals of this one.

    ``price``: this step's, or 0 where none is known yet.  A step in which nothing improved leaves
    it as it is.  All are float64 scalars.
    """
    known = (improvement > 0) & (improvement < float("inf")) & (cost > 0)
    found = improvement / b.where(known, cost, 1.0)
    return b.where(known, _snap(b, b.where(price > 0, _bounded(b, found, price), found)), price)


def paced_price(
    b: Backend, price: Array, step: Array, fixed: Array, variable: Array, share: float | None
) -> Array:
    """The d / T of the next step, for the progress of noisy training with error feedback.

    ``price``: this step's d / T.  ``step``: that of the next, from 1.  ``fixed`` and ``variable``: what
    this step cost without and for what it sent.

    Time to a target is steps times the time of a step, and least where one per cent more coordinates
    saves as much by fewer steps as it costs by longer ones: where the variable cost, in fixed ones, is
    the elasticity of the number of steps.  With the elasticity ``ELASTICITY * RATIO * d / T`` (what is
    sent late, by about d / T steps, makes training that much longer) and a cost in proportion to T,
    T is a square root.  ``share``: a share of a step's cost to hold
    instead.
    """
    known = (variable > 0) & (variable < float("inf")) & (fixed > 0) & (fixed < float("inf"))
    relative = b.where(known, variable, 1.0) / b.where(known, fixed, 1.0)
    if share is None:
        worth = ELASTICITY * RATIO * (1 + EARLY / step) * price
        found = price * b.sqrt(relative / worth)
        most = GREATEST_TIME
    else:
        found, most = price * 0, share / (1 - share)
    found = _greatest(b, found, price * (relative / most))
    found = _greatest(b, b.minimum(found, price * 0 + 1 / LEAST_RATIO), price * 0 + 1)
    return b.where(known, _snap(b, _bounded(b, found, price)), price)


def _greatest(b: Backend, x: Array, y: Array) -> Array:
    return 0 - b.minimum(0 - x, 0 - y)


def _bounded(b: Backend, found: Array, price: Array) -> Array:
    least, most = price / GREATEST_CHANGE, price * GREATEST_CHANGE
    return _greatest(b, b.minimum(found, most), least)


def _snap(b: Backend, value: Array) -> Array:
    """Few significant bits: ballots are summed in an order that is Horovod's own affair, and the
    last bit of a float32 sum must not decide which coordinates are sent."""
    dropped = 53 - _KEPT
    bits = b.bitcast(value, "int64") + (1 << (dropped - 1))
    return b.bitcast(b.shift_left(b.shift_right(bits, dropped), dropped), "float64")
