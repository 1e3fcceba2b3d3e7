"""Rounds against the condition number on ridge regression: what acceleration is worth.

    python benchmarks/eclk_slopes.py --json runs/eclk_slopes.json

Ten workers that disagree, d = 40, top-4, condition numbers 1e2 ... 3e4, rounds to a relative gap of 1e-8.
ECLK has the parameters of theory with L1 = L_f and p = k / d.  EF21 has gamma = 1 / L_f, and, tuned, the
best power of two times that for each condition number.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np

from hvd_adaptive.core.compressors import TopK
from hvd_adaptive.solvers import theory
from hvd_adaptive.solvers.ef21 import EF21
from hvd_adaptive.solvers.problems import Ridge
from hvd_adaptive.solvers.tuning import attempt

CONDITIONS = (1e2, 3e2, 1e3, 3e3, 1e4, 3e4)
WORKERS, ROWS, D, K = 10, 200, 40, 4
TARGET = 1e-8


def problem(condition: float, seed: int = 0) -> Ridge:
    """A Hessian with eigenvalues spaced evenly in the logarithm, and noise that sets workers apart."""
    rng = np.random.default_rng(seed)
    left, _ = np.linalg.qr(rng.normal(size=(ROWS, D)))
    right, _ = np.linalg.qr(rng.normal(size=(D, D)))
    features = left * np.sqrt(ROWS * np.geomspace(1.0, 1.0 / condition, D)) @ right.T
    return Ridge(features, features @ rng.normal(size=D) + rng.normal(size=ROWS), workers=WORKERS)


@click.command()
@click.option("--most", default=3e4, show_default=True, help="The largest condition number.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(most, json_path) -> None:
    """Print rounds per condition number and the slopes of their logarithms, and write them."""
    conditions = [one for one in CONDITIONS if one <= most]
    rounds = {name: [] for name in ("ECLK coin", "ECLK even", "EF21", "EF21 tuned")}
    scale = 1.0
    for condition in conditions:
        one = problem(condition)
        constants = one.smoothness

        def count(method, limit=np.inf, one=one):
            _, score = attempt(method, one, 3_000_000, TARGET, limit=limit)
            return np.inf if score.missed else score.cost

        for schedule in ("coin", "even"):
            method = theory.eclk(constants, TopK(K), D, K / D, L1=constants.mean, schedule=schedule)
            rounds[f"ECLK {schedule}"].append(count(method))
        plain = best = count(EF21(1.0 / constants.mean, TopK(K)))
        rounds["EF21"].append(plain)
        for factor in (2.0, 4.0, 8.0, 16.0):
            found = count(EF21(factor / constants.mean, TopK(K)), best)
            if found >= best:
                break
            best, scale = found, factor
        rounds["EF21 tuned"].append(best)
        latest = ", ".join(f"{name} {counts[-1]:.0f}" for name, counts in rounds.items())
        click.echo(f"kappa {condition:g}: {latest} (at {scale:g} / L)")
    slopes = {
        name: float(np.polyfit(np.log(conditions), np.log(counts), 1)[0]) for name, counts in rounds.items()
    }
    click.echo(f"slopes: {slopes}")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        report = {"conditions": conditions, "rounds": rounds, "slopes": slopes}
        json_path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
