"""What becomes of residuals when the ranks of a training job change.

Who stays keeps its residual; who comes begins with none; what a rank that is gone had not sent is
lost, and that is all that is lost.  Steps, price and whatever else all ranks hold alike come from
rank 0; a residual never does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Presence(NamedTuple):
    """What one rank tells the others when they meet.

    ``before``: how many ranks it trained with until now; 0 where it has just come.  ``energy``: the
    squared norm of its residuals, in squared gradient units.
    """

    before: int
    energy: float


@dataclass(frozen=True)
class Change:
    """``stayed``, ``came`` and ``lost``: numbers of ranks.  ``norm``: an estimate of the norm of the
    residuals that were lost, from those of the ranks that stayed."""

    stayed: int
    came: int
    lost: int
    norm: float

    def __str__(self) -> str:
        said = f"{self.stayed} ranks stayed and {self.came} came"
        if not self.lost:
            return f"{said}; no residual was lost"
        return (
            f"{said}; {self.lost} were lost, and with them what they had not sent: residuals of a norm of "
            f"about {self.norm:.3g}, as those of the others"
        )


def change(present: Sequence[Presence]) -> Change:
    """The change that the ranks' words amount to, the same on every rank."""
    stayed = [p for p in present if p.before]
    before = max((p.before for p in stayed), default=0)
    lost = max(0, before - len(stayed))
    mean = sum(p.energy for p in stayed) / max(1, len(stayed))
    return Change(len(stayed), len(present) - len(stayed), lost, math.sqrt(mean * lost))
