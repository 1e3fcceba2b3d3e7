"""Plots of ``hvd-adaptive report``.  Needs matplotlib."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .report_runs import PARTS, WINDOW, Cell, Course, rate_name
from .report_scaling import WORKERS, simulated

# Okabe and Ito's colours, which the colour-blind tell apart too; a family of contestants has one colour.
_BLACK, _ORANGE, _SKY, _GREEN, _BLUE, _RED, _PINK = (
    *("#000000", "#e69f00", "#56b4e9", "#009e73"),
    *("#0072b2", "#d55e00", "#cc79a7"),
)
_STYLES: Mapping[str, tuple[str, str, str]] = {
    "dense": (_BLACK, "-", "o"),
    "fp16": (_BLACK, ":", "s"),
    "topk10": (_SKY, "-", "^"),
    "topk1": (_SKY, "--", "v"),
    "topk0.1": (_SKY, ":", "D"),
    "adaptive": (_RED, "-", "*"),
    "calibrated": (_RED, "--", "P"),
    "ddp": (_GREEN, "-", "o"),
    "ddp-fp16": (_GREEN, "--", "s"),
    "ddp-bf16": (_GREEN, ":", "X"),
    "powersgd1": (_PINK, "-", "^"),
    "powersgd2": (_PINK, "--", "v"),
    "powersgd4": (_PINK, ":", "D"),
}
_PART_STYLES = {
    "compute": (_SKY, "computation", ""),
    "compress": (_ORANGE, "compress", "//"),
    "decompress": (_PINK, "decompress", "\\\\"),
    "communicate": (_BLUE, "communication not hidden", ""),
}
_OURS = ("adaptive", "calibrated")


@dataclass(frozen=True)
class Plot:
    """A picture and what it shows."""

    path: Path
    title: str
    caption: str


def draw(folder: Path, summary: Mapping[str, Any], found: Mapping[Cell, Sequence[Course]]) -> Iterable[Plot]:
    """Write the plots of every task, and yield each."""
    for task in sorted({cell["task"] for cell in summary["cells"]}):
        cells = [cell for cell in summary["cells"] if cell["task"] == task]
        ranks = max(cell["ranks"] for cell in cells)
        own = [cell for cell in cells if cell["ranks"] == ranks]
        here = {key: value for key, value in found.items() if key[:2] == (task, ranks)}
        yield _time_to_target(folder / f"{task}-time-to-target.png", task, ranks, own)
        yield _loss(folder / f"{task}-loss-time.png", task, ranks, here, against="seconds")
        yield _loss(folder / f"{task}-loss-bits.png", task, ranks, here, against="bits")
        yield _parts(folder / f"{task}-parts.png", task, ranks, own)


def draw_scaling(folder: Path, runs: Sequence[Mapping[str, Any]]) -> Iterable[Plot]:
    """Write, for every task, the seconds of a step against the number of workers."""
    good = [run for run in runs if "failed" not in run]
    for task in sorted({run["task"] for run in good}):
        yield _scaling(folder / f"{task}-scaling.png", task, [run for run in good if run["task"] == task])


def _rates(keys: Iterable[float | None]) -> list[float | None]:
    """Slowest first; None, unlimited, last."""
    return sorted(set(keys), key=lambda rate: math.inf if rate is None else rate)


def _style(name: str) -> tuple[str, str, str]:
    return _STYLES.get(name, (_ORANGE, "-.", "h"))


def _order(name: str) -> int:
    return list(_STYLES).index(name) if name in _STYLES else len(_STYLES)


def _line(name: str) -> dict[str, Any]:
    color, line, marker = _style(name)
    wide = name in _OURS
    return {
        "color": color,
        "linestyle": line,
        "marker": marker,
        "markersize": 8 if wide else 5,
        "linewidth": 2.4 if wide else 1.4,
        "zorder": 4 if wide else 3,
    }


def _panels(count: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(width * count + 0.4, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _time_to_target(path: Path, task: str, ranks: int, cells: Sequence[Mapping[str, Any]]) -> Plot:
    rates = _rates(cell["rate"] for cell in cells)
    most = max(sum(cell["rate"] == rate for cell in cells) for rate in rates)
    figure, axes = _panels(len(rates), 5.0, 1.3 + 0.34 * most)
    for axis, rate in zip(axes, rates, strict=True):
        own = sorted(
            (cell for cell in cells if cell["rate"] == rate),
            key=lambda cell: (cell["seconds_median"] or math.inf, _order(cell["contestant"])),
            reverse=True,
        )
        reached = [cell for cell in own if cell["seconds_median"]]
        longest = max((max(s for s in cell["seconds"] if s) for cell in reached), default=1.0)
        for y, cell in enumerate(own):
            middle = cell["seconds_median"]
            if middle is None:
                axis.text(
                    0.02,
                    y,
                    "target not reached",
                    va="center",
                    fontsize=8,
                    color="0.35",
                    transform=_across(axis),
                )
                continue
            seconds = [s for s in cell["seconds"] if s]
            color, _, marker = _style(cell["contestant"])
            # A bar would have no length on an axis without a zero.
            axis.axhline(y, color="0.9", linewidth=0.8, zorder=1)
            axis.plot([min(seconds), max(seconds)], [y, y], color=color, linewidth=3, alpha=0.5)
            axis.plot(middle, y, color=color, marker=marker, markersize=9, linestyle="none")
            quotient = "" if cell["quotient"] is None else f"  {cell['quotient']:.2f}×"
            axis.annotate(
                f"{_short(middle)} s{quotient}",
                (max(seconds), y),
                xytext=(10, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axis.set_yticks(range(len(own)), [cell["label"] for cell in own], fontsize=9)
        axis.set_ylim(-0.6, len(own) - 0.4)
        least = min((min(s for s in cell["seconds"] if s) for cell in reached), default=0.1)
        axis.set(xscale="log", xlim=(least / 2, longest * 5))
        _plain(axis.xaxis)
        axis.set_title(rate_name(rate), fontsize=10)
        axis.set_xlabel("seconds to the target loss (logarithmic)")
        axis.spines[["top", "right"]].set_visible(False)
    target = cells[0]["target"]
    figure.suptitle(f"{task}, {ranks} workers: seconds until the held-out loss is {target:g}", fontsize=11)
    caption = (
        "Median over the seeds; the line goes from the fastest to the slowest seed. The loss is the "
        f"mean of the last {WINDOW} checks. Beside each: "
        "seconds, and how many times faster than dense Horovod over the same link."
    )
    return _save(figure, path, "Time to target", caption)


def _plain(axis: Any) -> None:
    """Ticks as plain numbers: at 1, 2 and 5 of each decade where these are few, else at 1."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _across(axis: Any) -> Any:
    """Coordinates: share of the panel's width, and data in height."""
    return axis.get_yaxis_transform()


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _loss(path: Path, task: str, ranks: int, found: Mapping[Cell, Sequence[Course]], *, against: str) -> Plot:
    rates = _rates(cell[2] for cell in found)
    figure, axes = _panels(len(rates), 4.6, 4.4)
    handles: dict[str, Any] = {}
    for axis, rate in zip(axes, rates, strict=True):
        own = [(cell, courses) for cell, courses in found.items() if cell[2] == rate]
        for cell, courses in sorted(own, key=lambda item: _order(item[0][3])):
            checks = courses[0].checks()
            x = [check[0] if against == "seconds" else check[1] / 8e6 for check in checks]
            many = max(1, len(x) // 6)
            (line,) = axis.plot(x, [check[2] for check in checks], markevery=many, **_line(cell[3]))
            handles.setdefault(courses[0].run["label"], line)
        axis.axhline(next(iter(own))[1][0].run["target"], color="0.5", linewidth=0.8, linestyle=(0, (1, 1)))
        axis.set(xscale="log")
        _plain(axis.xaxis)
        axis.set_title(rate_name(rate), fontsize=10)
        axis.set_xlabel("seconds" if against == "seconds" else "megabytes sent by a worker")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out loss (cross entropy)")
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=8, handlelength=3)
    what = "time" if against == "seconds" else "what was sent"
    figure.suptitle(f"{task}, {ranks} workers: loss against {what}", fontsize=11)
    caption = (
        "First seed. The dotted line is the target, at which a run ends. The horizontal axes are logarithmic."
    )
    return _save(figure, path, f"Loss against {what}", caption)


def _parts(path: Path, task: str, ranks: int, cells: Sequence[Mapping[str, Any]]) -> Plot:
    rates = _rates(cell["rate"] for cell in cells)
    most = max(sum(cell["rate"] == rate for cell in cells) for rate in rates)
    figure, axes = _panels(len(rates), 5.0, 1.7 + 0.34 * most)
    bars: list[Any] = []
    for axis, rate in zip(axes, rates, strict=True):
        own = sorted(
            (cell for cell in cells if cell["rate"] == rate),
            key=lambda cell: _order(cell["contestant"]),
            reverse=True,
        )
        left = np.zeros(len(own))
        bars = []
        for part in PARTS:
            color, label, hatch = _PART_STYLES[part]
            width = np.array([1e3 * cell["parts"][part] for cell in own])
            look: dict[str, Any] = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
            bars.append(axis.barh(range(len(own)), width, left=left, label=label, height=0.7, **look))
            left += width
        for y, whole in enumerate(left):
            axis.text(whole + 0.01 * left.max(), y, f"{whole:.0f}", va="center", fontsize=8)
        axis.set_yticks(range(len(own)), [cell["label"] for cell in own], fontsize=9)
        axis.set_xlim(0, 1.13 * left.max())
        axis.set_title(rate_name(rate), fontsize=10)
        axis.set_xlabel("milliseconds of a step")
        axis.spines[["top", "right"]].set_visible(False)
    labels = [_PART_STYLES[part][1] for part in PARTS]
    figure.legend(bars, labels, loc="outside lower center", ncols=4 if len(rates) > 1 else 2, fontsize=9)
    figure.suptitle(f"{task}, {ranks} workers: where the time of a step goes", fontsize=11)
    caption = (
        "Means over the steps, median over the seeds. Computation was timed apart, in steps without "
        "communication; compress and decompress inside of the compressor (of DDP's hooks: the call, which "
        "includes starting the collective); the rest is communication that nothing hides."
    )
    return _save(figure, path, "Where the time goes", caption)


def _scaling(path: Path, task: str, runs: Sequence[Mapping[str, Any]]) -> Plot:
    rates = [rate for rate in _rates(run["rate"] for run in runs) if rate is not None]
    figure, axes = _panels(max(1, len(rates)), 5.0, 4.4)
    handles: dict[str, Any] = {}
    for axis, rate in itertools.zip_longest(axes, rates):
        if rate is None:
            axis.text(0.5, 0.5, "no run over a link with a rate", ha="center", transform=axis.transAxes)
            continue
        at = [run for run in runs if run["rate"] == rate]
        for name in sorted({run["contestant"] for run in at}, key=_order):
            own = [run for run in at if run["contestant"] == name]
            line = _line(name)
            measured: dict[int, list[float]] = {}
            for run in own:
                measured.setdefault(run["ranks"], []).append(float(np.median(run["step_seconds"])))
            points = sorted((n, 1e3 * float(np.median(s))) for n, s in measured.items())
            base = max(own, key=lambda run: run["ranks"])
            first = base["ranks"]
            workers = [n for n in WORKERS if n >= first]
            axis.plot(
                workers,
                [1e3 * simulated(base, n) for n in workers],
                color=line["color"],
                linestyle=line["linestyle"],
                linewidth=line["linewidth"],
                zorder=line["zorder"],
            )
            axis.plot(*zip(*points, strict=True), **{**line, "linestyle": "none", "markersize": 7})
            (handle,) = axis.plot([], [], **line)
            handles.setdefault(base["label"], handle)
        axis.axvspan(1.5, first * 1.25, color="0.93", zorder=0)
        axis.text(1.6, 0.985, "measured", fontsize=8, va="top", transform=axis.get_xaxis_transform())
        axis.text(first * 1.4, 0.985, "simulated", fontsize=8, va="top", transform=axis.get_xaxis_transform())
        axis.set(xscale="log", yscale="log", xlim=(1.5, 1400))
        axis.set_xticks([2, 4, 16, 64, 256, 1024], ["2", "4", "16", "64", "256", "1024"])
        axis.minorticks_off()
        low, high = axis.get_ylim()
        axis.set_ylim(low, high * 1.6)
        axis.set_title(rate_name(rate), fontsize=10)
        axis.set_xlabel("workers")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("milliseconds of a step")
    if handles:
        figure.legend(
            handles.values(), handles.keys(), loc="outside right center", fontsize=8, handlelength=3
        )
    figure.suptitle(f"{task}: seconds of a step against the number of workers", fontsize=11)
    caption = (
        "Markers: measured. Lines: simulated, by the time model of hvd-adaptive simulate, from the measured "
        "computation, the payload that a worker handed over, and the rate; a worker's message stays as long "
        "as it was at the largest measured number, and adaptive goes dense where that is faster. The model "
        "does not know of workers that share the processors of one machine, where measured steps are longer."
    )
    return _save(figure, path, "Scaling with workers", caption)


def _save(figure: Figure, path: Path, title: str, caption: str) -> Plot:
    figure.savefig(path, dpi=110)
    return Plot(path, title, caption)
