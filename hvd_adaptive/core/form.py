"""In which form adaptive sends a matrix: a few of its coordinates, or what it is along a few directions.

What counts is which of the two, at the same cost, takes more of the energy of gradient and residual
away.  Directions come first, since while they are sent it costs next to nothing to know what coordinates
would have done, by the sample that a threshold is read off; the other way round it would cost a product
of matrices.  What is not sent piles up, and makes what was not chosen look better than it is: so it takes
much to give directions up again, and a matrix that has turned to coordinates stays there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .backend import Array, Backend

LEARNING = 4
"""Steps until directions have been learnt, whose improvement says nothing yet."""

STEPS = 8
"""Steps for which directions are sent before it is asked whether they do more."""

FEWEST = 4
"""Directions that a step must be able to afford.  Fewer leave too much unsent for good: one took more energy
away than coordinates did, and the language model still needed a third more steps."""

KEPT = 0.9
"""What a step leaves of the lead before it."""

LOST = -5.0
"""The lead at which directions that won their trial are given up: coordinates take three times as much."""


class Trial(NamedTuple):
    """``steps``: with directions.  ``lead``: how much more they did than coordinates would have, summed
    with the last steps counting most; each between -1 and 1.  Numbers, or scalars of a graph."""

    steps: Any = 0.0
    lead: Any = 0.0

    @property
    def goes_on(self) -> Any:
        """Whether directions are sent where enough of them can be afforded."""
        won = (self.steps > STEPS) & (self.lead > LOST)
        return (self.steps < STEPS) | (self.lead > 0) | won

    def after(self, b: Backend, improvement: Array, alternative: Array) -> Trial:
        """After a step with directions that took ``improvement`` away, where coordinates would have
        taken ``alternative``; float64 scalars."""
        both = improvement + alternative
        told = (both > 0) & (both < float("inf"))  # of gradients of zeros nothing can be learnt
        known = told & (self.steps >= LEARNING)
        now = (improvement - alternative) / b.where(known, both, 1.0)
        steps = b.where(told, self.steps + 1, self.steps)
        return Trial(steps, self.lead * KEPT + b.where(known, now, 0.0))
