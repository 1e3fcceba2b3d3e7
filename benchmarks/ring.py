"""What a worker receives until the language model is trained: by allgather, and by the ring.

    python benchmarks/ring.py --workers 4 --workers 64 --json runs/ring.json

Bits are those of the wire: of a ring allreduce a worker receives 2 (n - 1)/n times what comes out of it, of
an allgather the messages of all others.  One process simulates all workers (64 of them take minutes a run).
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from hvd_adaptive.core.recipe import topk
from hvd_adaptive.simulation.run import Trace, train
from hvd_adaptive.simulation.tasks import task


@click.command()
@click.option("--workers", multiple=True, default=(4, 64), show_default=True)
@click.option(
    "--gathered", default=0.01, show_default=True, help="Ratio of the allgather, at the fewest workers."
)
@click.option("--named", default=0.02, show_default=True, help="Ratio of the ring.")
@click.option("--target", default=2.0, show_default=True, help="Held-out loss.")
@click.option("--steps", default=800, show_default=True, help="At most.")
@click.option("--json", "path", required=True, type=click.Path(dir_okay=False, path_type=Path))
def main(
    workers: tuple[int, ...], gathered: float, named: float, target: float, steps: int, path: Path
) -> None:
    """Train over each transport and number of workers, and compare what a worker has received by then."""
    torch.set_num_threads(1)
    chosen, console = task("language"), Console()
    runs = [(min(workers), "allgather", gathered)] + [(n, "ring", named) for n in workers]
    rows = []
    for n, transport, ratio in runs:
        trace = Trace()
        recipe = topk(ratio, transport=transport)
        with console.status(f"{transport}, {n} workers"):
            for trace in train(chosen, recipe, workers=n, steps=steps, until=target):  # noqa: B007
                pass
        reached = trace.steps_to(target)
        bits = sum(trace.wire[1 : int(reached or len(trace.wire))])  # in the first step all are alike
        row = {
            "workers": n,
            "transport": transport,
            "ratio": ratio,
            "steps": reached,
            "bits_per_worker": bits,
        }
        rows.append(row)
        console.print(row)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"target": target, "runs": rows}, indent=1))
    table = Table("workers", "transport", "ratio", "steps", "Mbit per worker", "of the allgather's")
    for row in rows:
        steps_taken = "not reached" if row["steps"] is None else f"{row['steps']:.0f}"
        share = row["bits_per_worker"] / rows[0]["bits_per_worker"]
        cells = f"{row['ratio']:.2g}", steps_taken, f"{row['bits_per_worker'] / 1e6:.1f}", f"{share:.2f}"
        table.add_row(str(row["workers"]), row["transport"], *cells)
    console.print(table)


if __name__ == "__main__":
    main()
