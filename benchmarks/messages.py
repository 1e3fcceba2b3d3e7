"""Size and speed of wire messages: ``python benchmarks/messages.py [--json FILE]``.

For each kind of values, each ratio of coordinates and each path through the code: bits per
coordinate against the entropy of a random support plus the bits of the values, and millions of
coordinates per second of CPU time (one thread) in encode, decode and accumulate (of two messages).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hvd_adaptive.core import kernels, message
from hvd_adaptive.core.values import KINDS

PATHS = ("numpy", "numpy-primitives", "torch", "torch-primitives")


def entropy(dimension: int, count: int) -> float:
    """log2 of the number of supports, per coordinate."""
    log = math.lgamma(dimension + 1) - math.lgamma(count + 1) - math.lgamma(dimension - count + 1)
    return log / math.log(2) / count


def cpu_seconds(call: Callable[[], Any], repeats: int) -> float:
    """The least CPU time of ``repeats`` calls after one that is not counted."""
    call()
    best = math.inf
    for _ in range(repeats):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best


def measure(path: str, kind: str, ratio: float, dimension: int, repeats: int) -> dict[str, Any]:
    """One line of the table."""
    rng = np.random.default_rng(0)
    count = max(round(dimension * ratio), 1)
    indices = np.sort(rng.choice(dimension, count, replace=False))
    values = rng.standard_t(3, count).astype(np.float32)
    bound = entropy(dimension, count) + KINDS[kind].bits
    bits = 32 * len(message.encode(indices, values, dimension, kind, pad=False)) / count
    if path.startswith("torch"):
        import torch

        torch.set_num_threads(1)
        indices, values = torch.from_numpy(indices), torch.from_numpy(values)
    with kernels.disabled() if path.endswith("primitives") else nullcontext():
        words = message.encode(indices, values, dimension, kind)
        both = np.concatenate([words, words]) if path.startswith("numpy") else torch.cat([words, words])
        seconds = {
            "encode": cpu_seconds(lambda: message.encode(indices, values, dimension, kind), repeats),
            "decode": cpu_seconds(lambda: message.decode(words, dimension), repeats),
            "accumulate": cpu_seconds(lambda: message.accumulate(both, 2, dimension), repeats) / 2,
        }
    rates = {f"{what}_per_second": count / max(value, 1e-9) for what, value in seconds.items()}
    return {
        "path": path,
        "kind": kind,
        "ratio": ratio,
        "dimension": dimension,
        "count": count,
        "bits_per_coordinate": bits,
        "bits_over_entropy": bits / bound,
        "padding": len(words) * 32 / count / bits - 1,
        **rates,
    }


@click.command()
@click.option("--dimension", default=25_000_000, show_default=True, help="Length of the vector.")
@click.option("--ratio", "ratios", multiple=True, type=float, default=(1e-3, 1e-2, 1e-1), show_default=True)
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), default=tuple(KINDS))
@click.option("--path", "paths", multiple=True, type=click.Choice(PATHS), default=("numpy", "torch"))
@click.option("--repeats", default=5, show_default=True, help="The best of so many runs is reported.")
@click.option(
    "--json", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write the cases here."
)
def main(
    dimension: int,
    ratios: tuple[float, ...],
    kinds: tuple[str, ...],
    paths: tuple[str, ...],
    repeats: int,
    target: Path | None,
) -> None:
    """Size and speed of wire messages, by kind of values, ratio and path."""
    settings = [(path, kind, ratio) for path in paths for kind in kinds for ratio in ratios]
    cases = [measure(*setting, dimension, repeats) for setting in track(settings, "messages")]
    table = Table(
        title=f"Messages of a vector of {dimension:,} elements; rates in million coordinates / CPU s"
    )
    for name in (
        "path",
        "kind",
        "ratio",
        "bits/coord.",
        "/ entropy",
        "padding",
        "encode",
        "decode",
        "accumulate",
    ):
        table.add_column(name, justify="left" if name in ("path", "kind") else "right")
    for case in cases:
        table.add_row(
            case["path"],
            case["kind"],
            f"{case['ratio']:g}",
            f"{case['bits_per_coordinate']:.2f}",
            f"{case['bits_over_entropy']:.3f}",
            f"{case['padding']:.1%}",
            *(f"{case[what + '_per_second'] / 1e6:.0f}" for what in ("encode", "decode", "accumulate")),
        )
    Console().print(table)
    if target is not None:
        target.write_text(json.dumps({"cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
