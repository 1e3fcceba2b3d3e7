"""One scalar price that tunes every tensor of every worker.

The rule of the CAT paper maximises improvement / cost.  Over many tensors and workers that is a
fractional programme, and Dinkelbach's method solves it: at price p send whatever improves by more
than p times its cost; the next price is the total improvement over the total cost.  From below the
optimum the price climbs to it monotonically and superlinearly; one step of training makes one step
of it, so the price follows the gradients as they change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .ballot import Tally

GREATEST_CHANGE = 4.0
"""A step changes the price by no more than this factor, either way."""


def next_price(price: float, tallies: Sequence[Tally]) -> float:
    """The price of the next step (improvement per unit of cost) from this step's ballots.

    ``price``: this step's, or 0 where none is known yet.  Steps in which nothing improved (all
    gradients zero, or one not finite) leave it as it is.
    """
    usable = [t for t in tallies if not t.nonfinite]
    improvement = sum(t.improvement for t in usable)
    cost = sum(t.cost for t in usable)
    if not (improvement > 0 and cost > 0):
        return price
    found = improvement / cost
    if price > 0:
        found = min(max(found, price / GREATEST_CHANGE), price * GREATEST_CHANGE)
    return _snap(found)


def _snap(value: float) -> float:
    """Eight significant bits: ballots are summed in an order that is Horovod's own affair, and the
    last bit of a float32 sum must not decide which coordinates are sent."""
    mantissa, exponent = np.frexp(value)
    return float(np.ldexp(np.round(mantissa * 256), int(exponent) - 8))
