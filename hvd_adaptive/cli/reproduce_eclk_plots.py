"""The plots of ``reproduce eclk``: gap against rounds, gap against bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from ..solvers.comparison import Outcome


def draw(outcomes: Sequence[Outcome], least: float, folder: Path, stem: str, title: str) -> list[Path]:
    """Write two PNG files and return their paths."""
    written = []
    for what, label in (("rounds", "communication rounds"), ("bits", "bits sent per worker")):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for number, outcome in enumerate(outcomes):
            gaps = outcome.history.gaps(least)
            positive = gaps > 0
            along = np.array(getattr(outcome.history, what), dtype=float)
            style = "--" if outcome.label in ("GD", "AGD", "L-Katyusha") else "-"
            axes.plot(along[positive], gaps[positive], style, color=f"C{number}", label=outcome.label, lw=1.4)
        axes.set(yscale="log", xlabel=label, ylabel="relative objective gap", title=title)
        if what == "bits":
            axes.set_xscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        path = folder / f"{stem}-{what}.png"
        figure.savefig(path, dpi=140)
        written.append(path)
    return written
