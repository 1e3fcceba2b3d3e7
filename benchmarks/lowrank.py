"""Directions against coordinates: steps, and bits on the wire, until a model is trained.

    python benchmarks/lowrank.py --json runs/lowrank.json

The tasks are those of the network benchmark; one process simulates four workers.  What a worker receives is
counted as it passes: of a ring allreduce 2 (n - 1)/n times what comes out of it, of an allgather the
messages of all others.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from hvd_adaptive.core.recipe import Recipe, lowrank, none, topk
from hvd_adaptive.simulation.run import Trace, train

sys.path.insert(0, str(Path(__file__).parent / "network"))

from tasks import task

WORKERS = 4
RECIPES: dict[str, Recipe] = {
    "dense": none(),
    **{f"lowrank, rank {rank}": lowrank(rank) for rank in (4, 8, 16, 32)},
    **{f"topk {ratio:.0%}, int4": topk(ratio, values="int4") for ratio in (0.01, 0.03)},
}


@click.command()
@click.option("--task", "names", multiple=True, default=("mlp", "language"), show_default=True)
@click.option("--steps", default=400, show_default=True, help="At most.")
@click.option("--json", "path", required=True, type=click.Path(dir_okay=False, path_type=Path))
def main(names: tuple[str, ...], steps: int, path: Path) -> None:
    """Train each task with each recipe, and compare."""
    torch.set_num_threads(1)
    console, rows = Console(), []
    table = Table("task", "recipe", "steps", "Mbit a step", "Mbit in all")
    for name in names:
        chosen = task(name)
        for label, recipe in RECIPES.items():
            trace = Trace()
            with console.status(f"{name}, {label}"):
                run = train(chosen, recipe, workers=WORKERS, steps=steps, check_every=5, until=chosen.target)
                for trace in run:  # noqa: B007
                    pass
            reached = trace.steps_to(chosen.target)
            ring = 2 * (WORKERS - 1) / WORKERS  # of a dense step the result was counted
            wire = [
                bits * (ring if dense else 1.0) for bits, dense in zip(trace.wire, trace.dense, strict=True)
            ]
            row = {
                "task": name,
                "recipe": label,
                "steps": reached,
                "mbit": sum(wire) / 1e6,
                "taken": len(wire),
            }
            rows.append(row)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(rows, indent=1))
            told = "not reached" if reached is None else f"{reached:.0f}"
            table.add_row(name, label, told, f"{row['mbit'] / len(wire):.2f}", f"{row['mbit']:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
