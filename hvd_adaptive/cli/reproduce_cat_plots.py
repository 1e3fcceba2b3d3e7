"""Plots of ``hvd-adaptive reproduce cat``.  Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

if TYPE_CHECKING:
    from ..solvers.cat import Curves, Experiment, Run

_STYLE: dict[str, dict[str, Any]] = {
    "tuned": {"color": "tab:red", "linewidth": 2.2, "zorder": 3},
    "full": {"color": "black", "linestyle": "--"},
    "dynamic": {"color": "tab:green", "linestyle": "-."},
}


def draw(
    folder: Path, data: str, experiment: Experiment, runs: Sequence[Run], curves: Sequence[Curves]
) -> Iterable[Path]:
    """Write the plots, and yield the path of each."""
    yield _loss(folder / f"cat-{data}-loss.png", data, experiment, runs)
    yield _sparsity(folder / f"cat-{data}-sparsity.png", data, experiment, runs)
    yield _curves(folder / f"cat-{data}-curves.png", data, experiment, curves)


def _grid(experiment: Experiment, title: str) -> tuple[Any, Any]:
    rows, columns = len(experiment.families), len(experiment.costs)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.6 * columns + 0.6, 2.9 * rows + 0.6), squeeze=False, layout="constrained"
    )
    figure.suptitle(title)
    return figure, axes


def _panels(experiment: Experiment, axes: Any) -> Iterable[tuple[str, str, Any]]:
    for row, family in enumerate(experiment.families):
        for column, name in enumerate(experiment.costs):
            axis = axes[row][column]
            axis.set_title(f"{family}, {name}", fontsize=10)
            yield family, name, axis


def _loss(path: Path, data: str, experiment: Experiment, runs: Sequence[Run]) -> Path:
    figure, axes = _grid(experiment, f"{data}: loss against cumulative cost per worker")
    greys = {
        t: plt.cm.Blues(x)
        for t, x in zip(experiment.fixed, np.linspace(0.35, 0.9, len(experiment.fixed)), strict=True)
    }
    for family, name, axis in _panels(experiment, axes):
        for run in runs:
            if run.cost_name != name or (run.family != family and run.rule != "full"):
                continue
            style = _STYLE.get(run.rule) or {"color": greys[run.sparsity]}
            axis.plot(run.spent[1:], run.trajectory.losses[1:], label=run.name, **style)
            axis.set_xlabel(f"cost ({run.cost.unit})")
        axis.axhline(experiment.target, color="grey", linewidth=0.7, linestyle=":")
        axis.set_xscale("log")
        axis.legend(fontsize=7)
    for row in axes:
        row[0].set_ylabel("loss")
    return _save(figure, path)


def _sparsity(path: Path, data: str, experiment: Experiment, runs: Sequence[Run]) -> Path:
    figure, axes = _grid(experiment, f"{data}: T over iterations")
    for family, name, axis in _panels(experiment, axes):
        for run in runs:
            if run.cost_name == name and run.family == family and run.rule in ("tuned", "dynamic"):
                counts = run.trajectory.sparsities.mean(axis=1)
                axis.plot(
                    np.arange(1, counts.size + 1),
                    counts,
                    label=run.name,
                    **(_STYLE[run.rule] | {"linewidth": 0.9}),
                )
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("iteration")
    for row in axes:
        row[0].set_ylabel("T")
    return _save(figure, path)


def _curves(path: Path, data: str, experiment: Experiment, curves: Sequence[Curves]) -> Path:
    figure, axes = plt.subplots(
        3,
        len(experiment.costs),
        figsize=(3.6 * len(experiment.costs) + 0.6, 8),
        squeeze=False,
        layout="constrained",
    )
    figure.suptitle(f"{data}: improvement, cost and efficiency against T, first gradient; dots: the rule's T")
    for column, name in enumerate(experiment.costs):
        for one in curves:
            if one.cost_name != name:
                continue
            count, found = one.curve.sparsity, one.best
            (line,) = axes[0][column].plot(count, one.curve.improvement, label=one.family)
            axes[1][column].plot(count, one.curve.cost)
            axes[2][column].plot(count, one.curve.efficiency)
            for axis, value in zip(
                axes[:, column], (found.improvement, found.cost, found.efficiency), strict=True
            ):
                axis.plot(found.sparsity, value, "o", color=line.get_color())
            axes[1][column].set_ylabel(one.cost.unit)
        axes[0][column].set_title(name, fontsize=10)
        axes[2][column].set_xlabel("T")
        axes[2][column].set_yscale("log")
        for axis in axes[:, column]:
            axis.set_xscale("log")
    axes[0][0].set_ylabel("improvement")
    axes[2][0].set_ylabel("efficiency")
    axes[0][0].legend(fontsize=8)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
