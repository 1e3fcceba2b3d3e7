"""Gradient throughput of the solvers, and the time of a whole run.

    python benchmarks/solvers.py --data a9a --json runs/solvers.json

The gradient of all workers reads the CSR matrix twice (A x, then A' s by the transpose stored per worker).
It is compared with one pass of memory over the same bytes: the sum of the matrix's arrays, each read
once, in the same process.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
import numpy as np

from hvd_adaptive.core.compressors import TopK
from hvd_adaptive.solvers import data, theory
from hvd_adaptive.solvers.network import Cluster
from hvd_adaptive.solvers.problems import LogisticRegression
from hvd_adaptive.solvers.run import run


def seconds(call, repeats: int) -> float:
    """The fastest of ``repeats`` calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


@click.command()
@click.option("--data", "name", default="a9a", show_default=True)
@click.option("--workers", default=20, show_default=True)
@click.option("--l2", default=1e-3, show_default=True)
@click.option("--k", default=12, show_default=True)
@click.option("--repeats", default=50, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(name, workers, l2, k, repeats, json_path) -> None:
    """Print the figures, and write them."""
    started = time.perf_counter()
    dataset = data.arrange(data.load(name))
    problem = LogisticRegression(dataset.features, dataset.targets, l2=l2, workers=workers)
    constants, (_, least) = problem.smoothness, problem.optimum
    prepared = time.perf_counter() - started
    x = np.random.default_rng(0).normal(size=problem.dimension)
    matrix = problem.features
    arrays = (matrix.data, matrix.indices, matrix.indptr)
    size = sum(array.nbytes for array in arrays)

    # sums in the arrays' own words: what a pass over these bytes costs
    words = [array.view(np.int64) if array.nbytes % 8 == 0 else array for array in arrays]
    passed = seconds(lambda: [word.sum() for word in words], repeats)
    gradient = seconds(lambda: problem.gradients(x), repeats)

    method = theory.eclk(constants, TopK(k), problem.dimension, k / problem.dimension, L1=constants.mean / 4)
    begun, busy = time.perf_counter(), time.process_time()
    found = run(
        method, problem, Cluster(workers), 20_000, stop=lambda history: history.gaps(least)[-1] <= 1e-8
    )
    took, worked = time.perf_counter() - begun, time.process_time() - busy
    report = {
        "data": name, "rows": problem.rows, "dimension": problem.dimension, "nonzeros": int(matrix.nnz),
        "matrix_bytes": size, "pass_seconds": passed, "gradient_seconds": gradient,
        "gradient_over_pass": gradient / passed, "gradient_gigabytes_per_second": 2 * size / gradient / 1e9,
        "prepare_seconds": prepared, "run_seconds": took, "run_rounds": found.history.rounds[-1],
        "run_gap": float(found.history.gaps(least)[-1]), "run_cpu_seconds": worked,
    }  # fmt: skip
    click.echo(json.dumps(report, indent=1))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
