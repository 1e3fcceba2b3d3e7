"""What compressing and decompressing one tensor takes, in units of an in-place add of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..core import scan
from ..core.recipe import Recipe, randk, sign, topk
from ..core.worker import Worker
from ..torch.backend import TORCH


def run(json_path: str, dimension: int, ratios: Sequence[float], repeats: int) -> None:
    """Measures, prints a table and writes ``{"cases": [...]}``."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(dimension, generator=generator) ** 3  # heavy tails, as gradients have
    other = gradient.flip(0).clone()
    cases: list[dict[str, Any]] = []
    for ratio in ratios:
        contestants: list[tuple[str, Callable[[], object]]] = [
            (name, _round_trip(recipe, gradient)) for name, recipe in _recipes(ratio)
        ]
        count = max(1, int(ratio * dimension))
        threshold = float(torch.topk(gradient.abs(), count).values.min())
        contestants += [
            ("torch.topk of abs", partial(_topk, gradient, count)),
            ("mask and nonzero", partial(_mask, gradient, threshold)),
        ]
        for name, work in contestants:
            # The two are timed in turn, so that whatever else slows the machine slows both.
            seconds, adds = [], []
            for _ in range(repeats + 1):
                adds.append(_timed(partial(other.add_, gradient)))
                seconds.append(_timed(work))
            took, add = min(seconds[1:]), min(adds[1:])
            cases.append(
                {
                    "recipe": name,
                    "ratio": ratio,
                    "seconds": took,
                    "inplace_add_seconds": add,
                    "quotient": took / add,
                }
            )
    Path(json_path).write_text(json.dumps({"dimension": dimension, "cases": cases}, indent=1))
    threads = f"{scan.threads()} threads"
    table = Table("recipe", "ratio", "ms", "in-place adds", title=f"{dimension:,} coordinates, {threads}")
    for case in cases:
        table.add_row(
            case["recipe"],
            f"{case['ratio']:.2%}",
            f"{1e3 * case['seconds']:.1f}",
            f"{case['quotient']:.2f}",
        )
    Console().print(table)


def _recipes(ratio: float) -> list[tuple[str, Recipe]]:
    return [
        ("topk", topk(ratio)),
        ("topk, sampled", topk(ratio, exact=False)),
        ("topk, int8", topk(ratio, values="int8")),
        ("randk", randk(ratio)),
        ("sign", sign(ratio)),
    ]


def _round_trip(recipe: Recipe, gradient: torch.Tensor) -> Callable[[], object]:
    """Compress and decompress, as one of two ranks would whose messages are the same."""
    worker = Worker(TORCH, recipe, {"x": gradient.numel()})
    worker.meet([0], 0)
    storage = torch.empty_like(gradient)  # under Horovod the gradient's own, which is new in every step

    def step() -> object:
        outgoing, context = worker.outgoing(0, gradient)
        assert outgoing is not None
        messages = outgoing.message if worker.gathers(context) else None
        aggregate = worker.incoming(context, outgoing.ring, messages, storage)
        worker.done(context)
        return aggregate

    return step


def _topk(x: torch.Tensor, count: int) -> object:
    return torch.topk(x.abs(), count)


def _mask(x: torch.Tensor, threshold: float) -> object:
    return (x.abs() >= threshold).nonzero()


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
