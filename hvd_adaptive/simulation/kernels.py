"""What compressing and decompressing one tensor takes, in units of an in-place add of it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..core import scan
from ..core.recipe import Recipe, lowrank, randk, sign, topk
from ..core.worker import Worker
from ..torch.host import HOST

TENSORS, SIZE = 200, 16_384
"""A model of many tensors, as transformers are."""


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
                    "temporaries": _temporaries(work) / (4 * dimension),
                }
            )
    small = [_small(name, recipe, repeats) for name, recipe in _recipes(max(ratios))]
    document = {"dimension": dimension, "threads": scan.threads(), "cases": cases, "small_tensors": small}
    Path(json_path).write_text(json.dumps(document, indent=1))
    console, threads = Console(), f"{scan.threads()} threads"
    table = Table(
        *("recipe", "ratio", "ms", "in-place adds", "temporaries"),
        title=f"{dimension:,} coordinates, {threads}",
    )
    for case in cases:
        table.add_row(
            case["recipe"],
            f"{case['ratio']:.2%}",
            f"{1e3 * case['seconds']:.1f}",
            f"{case['quotient']:.2f}",
            f"{case['temporaries']:.1%} of d",
        )
    console.print(table)
    for case in small:
        console.print(
            f"{case['recipe']}: {case['microseconds_per_tensor']:.0f} microseconds for each of {TENSORS} "
            f"tensors of {SIZE:,}, {case['gathers']} allgathers a step"
        )


def _recipes(ratio: float) -> list[tuple[str, Recipe]]:
    return [
        ("topk", topk(ratio)),
        ("topk, sampled", topk(ratio, exact=False)),
        ("topk, int8", topk(ratio, values="int8")),
        ("randk", randk(ratio)),
        ("lowrank, rank 4", lowrank(4)),
        ("sign", sign(ratio)),
    ]


def _round_trip(recipe: Recipe, gradient: torch.Tensor) -> Callable[[], object]:
    """Compress and decompress, as one of two ranks would whose messages are the same; as the compressor for
    torch does in the host's memory."""
    worker, own = Worker(HOST, recipe, {"x": _square(gradient.numel())}), gradient.numpy()
    worker.meet([0], 0)
    storage = torch.empty_like(gradient).numpy()  # under Horovod the gradient's own, new in every step

    def step() -> object:
        outgoing, context = worker.outgoing(0, own)
        assert outgoing is not None
        messages = outgoing.message if worker.gathers(context) else None
        aggregate = worker.incoming(context, outgoing.ring, messages, storage)
        worker.done(context)
        return aggregate

    return step


def _small(name: str, recipe: Recipe, repeats: int) -> dict[str, Any]:
    """A model of many small tensors: what our part of a step takes for each."""
    worker = Worker(HOST, recipe, {f"x{i}": _square(SIZE) for i in range(TENSORS)})
    worker.meet([0], 0)
    gradient = torch.randn(SIZE, generator=torch.Generator().manual_seed(1)).numpy()

    def step() -> None:
        ways = [worker.outgoing(slot, gradient) for slot in range(TENSORS)]
        for outgoing, context in ways:
            assert outgoing is not None
            worker.incoming(context, outgoing.ring, outgoing.message if worker.gathers(context) else None)
            worker.done(context)

    took = min([_timed(step) for _ in range(repeats + 1)][1:])
    gathers = 0 if recipe.shared else len(worker.buckets())
    return {"recipe": name, "microseconds_per_tensor": 1e6 * took / TENSORS, "gathers": gathers}


def _square(dimension: int) -> tuple[int, int]:
    """The most nearly square matrix of so many elements."""
    rows = next(r for r in range(math.isqrt(dimension), 0, -1) if dimension % r == 0)
    return rows, dimension // rows


def _temporaries(work: Callable[[], object]) -> int:
    """Bytes that the process grew by at most while it worked; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = _status(status, "VmRSS")
        work()
        return max(0, _status(status, "VmHWM") - before)
    except (OSError, KeyError):
        return 0


def _status(path: Path, name: str) -> int:
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return 1024 * int(lines[name].split()[0])


def _topk(x: torch.Tensor, count: int) -> object:
    return torch.topk(x.abs(), count)


def _mask(x: torch.Tensor, threshold: float) -> object:
    return (x.abs() >= threshold).nonzero()


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
