"""The tuning rule inside ECLK against every fixed k: bits per worker to a relative gap of 1e-8.

    python benchmarks/eclk_adaptive.py --json runs/eclk_adaptive.json

ECLK with the second compressor and evenly spaced snapshots on l2-regularised logistic regression, 20
workers.  For each k of the grid, and for the rule, L1, p and theta1 are tuned for bits by the same walk with
the same budget.  The rule charges a round its payload and, beside it, ``charge`` times the expected bits of
its snapshot message; ``charge`` is tuned with them, as k is for the fixed ones.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from hvd_adaptive.core.compressors import TopK, adaptive
from hvd_adaptive.solvers import data, theory
from hvd_adaptive.solvers.problems import LogisticRegression
from hvd_adaptive.solvers.tuning import walk

SETS = ("mushrooms", "phishing", "a9a", "w8a")


@click.command()
@click.option("--data", "names", multiple=True, default=SETS, show_default=True)
@click.option("--workers", default=20, show_default=True)
@click.option("--l2", default=1e-3, show_default=True)
@click.option("--value", default="bfloat16", show_default=True)
@click.option("--k", "counts", multiple=True, type=int, default=(1, 2, 4, 8), show_default=True)
@click.option("--rule/--no-rule", default=True, show_default=True, help="Whether to run the rule.")
@click.option("--rounds", default=6000, show_default=True)
@click.option("--budget", default=12, show_default=True, help="Runs to tune each entry with.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(names, workers, l2, value, counts, rule, rounds, budget, json_path) -> None:
    """Print a line per entry, and write all of them."""
    report = []
    for name in names:
        dataset = data.arrange(data.load(name))
        problem = LogisticRegression(dataset.features, dataset.targets, l2=l2, workers=workers)
        constants, d = problem.smoothness, problem.dimension

        def build(s, k, constants=constants, d=d):
            p = min(1.0, s["p"] * max(k, 1) / d)
            snapshot = TopK(4 * max(k, 1), value)
            overhead = s.get("charge", 0.0) * p * snapshot.size(d)
            compressor = TopK(k, value) if k else adaptive(d, overhead, value)
            L1 = s["L1"] * constants.mean
            return theory.eclk(
                constants, compressor, d, p, snapshot, True, L1=L1, theta_scale=s["theta"], theta2=0.5,
                schedule="even",
            )  # fmt: skip

        for k in (*([0] if rule else []), *(one for one in counts if one <= d)):
            start = {"L1": 0.125, "p": 8.0, "theta": 2.0}
            moves = {"L1": (0.5, 2.0, 2**0.5, 2**-0.5), "p": (2**0.5, 2**-0.5), "theta": (2**0.5, 2**-0.5)}
            if not k:
                start, moves = {**start, "charge": 1 / 64}, {"charge": (0.5, 2.0), **moves}
            tuned = walk(
                lambda s, k=k: build(s, k), start, moves, problem, rounds, 1e-8, "bits", budget=budget,
            )  # fmt: skip
            entry = {
                "data": name,
                "k": k or "rule",
                "bits_per_worker": None if tuned.score.missed else tuned.score.cost,
                "rounds": tuned.result.history.rounds[-1],
                "gap": float(tuned.result.history.gaps(problem.optimum[1]).min()),
                "settings": tuned.settings,
            }
            report.append(entry)
            click.echo(entry)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps({"runs": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
