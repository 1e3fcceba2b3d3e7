"""The experiments behind the default of ``adaptive``: variants of it, on simulated workers.

    python benchmarks/tuning.py run --variant default --variant int8 --r 10 --json runs/tuning.json
    python benchmarks/tuning.py table runs/hindsight.json     # of `hvd-adaptive bench hindsight --json ...`
    python benchmarks/tuning.py plot runs/hindsight.json docs/images

``run`` prints, for each variant, task, r and seed: steps and time to the target, and the share of
coordinates that were sent in the first 50 steps and after them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click

from hvd_adaptive.core import price
from hvd_adaptive.core.cost import LinkTime
from hvd_adaptive.core.recipe import Recipe, adaptive
from hvd_adaptive.simulation.run import Trace, link_of_ratio, train
from hvd_adaptive.simulation.tasks import task

Make = Callable[[LinkTime], Recipe]


def _variant(**options: Any) -> Make:
    return lambda link: adaptive(cost=link, **options)


VARIANTS: dict[str, tuple[Make, dict[str, float]]] = {
    "default": (_variant(), {}),
    **{kind: (_variant(values=kind), {}) for kind in ("int8", "fp16", "fp32")},
    "sign": (_variant(family="sign"), {}),
    "share": (_variant(values="fp32", share=0.1, rank=0), {}),
    "share int4": (_variant(share=0.1, rank=0), {}),
    "coordinates": (_variant(rank=0), {}),
    "few directions": (_variant(rank=8), {}),
    "energy": (_variant(objective="energy"), {}),
    "not early": (_variant(), {"EARLY": 0.0}),
    "twice as early": (_variant(), {"EARLY": 20.0}),
    "half the elasticity": (_variant(), {"ELASTICITY": 0.1}),
    "twice the elasticity": (_variant(), {"ELASTICITY": 0.4}),
}
"""What differs from the default: options, and constants of :mod:`hvd_adaptive.core.price`."""


@click.group()
def main() -> None:
    """Experiments with adaptive, and pictures of bench hindsight."""


@main.command()
@click.option("--variant", "variants", multiple=True, type=click.Choice(list(VARIANTS)), default=["default"])
@click.option("--task", "tasks", multiple=True, default=["mlp", "language"], show_default=True)
@click.option("--r", "ratios", multiple=True, default=[1.0, 10.0, 100.0], show_default=True)
@click.option("--seeds", default=1, show_default=True)
@click.option("--steps", default=2500, show_default=True)
@click.option("--json", "json_path", required=True, type=click.Path(dir_okay=False))
def run(
    variants: list[str], tasks: list[str], ratios: list[float], seeds: int, steps: int, json_path: str
) -> None:
    """Train every variant."""
    rows = []
    for seed in range(seeds):
        for name in tasks:
            for r in ratios:
                for variant in variants:
                    rows.append(_run(variant, name, r, seed, steps))
                    Path(json_path).write_text(json.dumps(rows, indent=1))


def _run(variant: str, name: str, r: float, seed: int, steps: int) -> dict[str, Any]:
    chosen, (make, constants) = task(name), VARIANTS[variant]
    dimension = sum(p.numel() for p in chosen.model().parameters())
    link, trace = link_of_ratio(r, dimension, 4), Trace()
    with ExitStack() as stack:
        for constant, value in constants.items():
            stack.enter_context(patch.object(price, constant, value))
        for trace in train(chosen, make(link), steps=steps, seed=seed, until=chosen.target):  # noqa: B007
            pass
    sent = [count / dimension for count in trace.sparsity]
    row = {
        "variant": variant,
        "task": name,
        "r": r,
        "seed": seed,
        "steps": trace.steps_to(chosen.target),
        "time": trace.time_to(chosen.target, link),
        "early_ratio": statistics.mean(sent[:50]),
        "ratio": statistics.mean(sent[50:] or sent),
    }
    click.echo(
        f"{name:10}r={r:<5g}seed {seed}  {variant:22}"
        f"steps {row['steps'] or float('nan'):6.0f}  time {row['time'] or float('nan'):8.1f}"
        f"  T/d {row['early_ratio']:.2%} then {row['ratio']:.2%}"
    )
    return row


@main.command()
@click.argument("file", type=click.Path(exists=True))
def table(file: str) -> None:
    """The cells of bench hindsight, as Markdown; of the quotients the range over seeds, too."""
    click.echo("| task | r | best fixed ratio | its time | constant 10 % | adaptive | quotient (by seed) |")
    click.echo("|---|---|---|---|---|---|---|")
    for row in json.loads(Path(file).read_text())["tasks"]:
        best = row["fixed_times"][str(row["best_fixed_ratio"])]
        each = [
            ours / min(t for t in (fixed, share) if t is not None)
            for ours, fixed, share in zip(row["adaptive_times"], best, row["share_times"], strict=True)
            if ours is not None and (fixed is not None or share is not None)
        ]
        click.echo(
            f"| {row['task']} | {row['r']:g} | {row['best_fixed_ratio']:.2g} | {row['best_fixed_time']:.0f} "
            f"| {row['share_time']:.0f} | {row['adaptive_time']:.0f} | {row['quotient']:.2f} "
            f"({', '.join(f'{q:.2f}' for q in each)}) |"
        )


@main.command()
@click.argument("file", type=click.Path(exists=True))
@click.argument("folder", type=click.Path(file_okay=False))
def plot(file: str, folder: str) -> None:
    """Draw time by fixed ratio beside adaptive, and T over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = json.loads(Path(file).read_text())["tasks"]
    names = sorted({row["task"] for row in rows})
    ratios = sorted({row["r"] for row in rows})
    times, axes = pyplot.subplots(
        len(names), len(ratios), squeeze=False, figsize=(4 * len(ratios), 3 * len(names))
    )
    paces, lower = pyplot.subplots(1, len(names), squeeze=False, figsize=(5 * len(names), 3.2))
    for row in rows:
        ax = axes[names.index(row["task"])][ratios.index(row["r"])]
        fixed = {
            float(q): statistics.median(float("inf") if t is None else t for t in found)
            for q, found in row["fixed_times"].items()
        }
        reached = {q: t for q, t in sorted(fixed.items()) if t < float("inf")}
        ax.plot(list(reached), list(reached.values()), "o-", label="fixed ratio")
        ax.axhline(row["share_time"], color="C1", linestyle="--", label="10 % for communication")
        ax.axhline(row["adaptive_time"], color="C2", label="adaptive")
        ax.set(xscale="log", yscale="log", title=f"{row['task']}, r = {row['r']:g}")
        ax.set(xlabel="T / d", ylabel="time to target (steps' computations)")
        panel = lower[0][names.index(row["task"])]
        panel.plot(row["adaptive_sparsity"][0], label=f"r = {row['r']:g}", linewidth=0.8)
        panel.set(
            yscale="log", title=row["task"], xlabel="step", ylabel="T, worker 0 (small tensors included)"
        )
    axes[0][0].legend(fontsize=8)
    lower[0][0].legend(fontsize=8)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for figure, name in ((times, "time-by-ratio.png"), (paces, "pace.png")):
        figure.tight_layout()
        figure.savefig(Path(folder) / name, dpi=110)


if __name__ == "__main__":
    main()
