"""Many steps of a small model with adaptive T: does memory stay flat, do replicas stay equal?

    horovodrun -np 4 python tests/parallel/workers/soak.py --steps 20000
    horovodrun -np 4 python tests/parallel/workers/soak.py --seconds 1200

Rank 0 prints a line per report and, at the end, one in JSON.  It ends with an error where replicas
differ or memory, after a warm-up, has grown by more than 2 %.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import click
import horovod.torch as hvd
import psutil
import torch
from torch import nn

from hvd_adaptive.core.cost import LinkTime, PayloadBits
from hvd_adaptive.torch import Compression, assert_replicas_equal

WARM_UP = 0.25
"""The share of the run after which memory is compared."""


def soak(steps: int | None, seconds: float | None, seed: int) -> dict[str, object]:
    """Trains for so many steps, or for so long; what came of it, the same on every rank but for memory."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    # The link is given, so that no measured time decides what is sent: the run can be repeated.
    link = LinkTime(PayloadBits(1), bandwidth=1e8, compute=0.002)
    compression = Compression.adaptive(model, cost=link)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    generator = torch.Generator().manual_seed(1000 * seed + hvd.rank())
    process, memory, sparsities = psutil.Process(), [], set()
    began, step, going = time.monotonic(), 0, True
    while going:
        optimizer.zero_grad()
        x = torch.randn(16, 64, generator=generator)
        (model(x) - x.cumsum(1) / 8).square().mean().backward()
        optimizer.step()
        step += 1
        sparsities.add(compression.statistics().sparsity["0.weight"])
        if step % 100 == 0:
            memory.append(process.memory_info().rss)
            elapsed = time.monotonic() - began
            mine = step < steps if steps is not None else elapsed < float(seconds or 0)
            # Rank 0 decides, so that all end at one step.
            going = bool(hvd.broadcast(torch.tensor(int(mine)), 0, name="soak.going"))
            if step % 1000 == 0 or not going:
                assert_replicas_equal(model)
                if hvd.rank() == 0:
                    print(
                        f"step {step}, {memory[-1] / 2**20:.1f} MiB, {threading.active_count()} threads",
                        flush=True,
                    )
    assert all(torch.isfinite(p).all() for p in model.parameters())
    after = memory[int(WARM_UP * len(memory)) :]
    checksum = sum(float(p.detach().double().sum()) for p in model.parameters())
    return {
        "steps": step,
        "memory_growth": max(after) / after[0] - 1,
        "mebibytes": after[-1] / 2**20,
        "threads": threading.active_count(),
        "different_T": len(sparsities),
        "sent_of_dense": compression.statistics().total.ratio,
        "checksum": checksum,
    }


@click.command(help=__doc__)
@click.option("--steps", type=int, help="so many steps")
@click.option("--seconds", type=float, help="so long")
@click.option("--seed", default=0, show_default=True)
def main(steps: int | None, seconds: float | None, seed: int) -> None:
    if (steps is None) == (seconds is None):
        raise click.UsageError("give either --steps or --seconds")
    hvd.init()
    found = soak(steps, seconds, seed)
    results = os.environ.get("HVD_ADAPTIVE_RESULTS")
    if results:
        from call import report

        report(found)
    if hvd.rank() == 0:
        print(json.dumps(found))
    if float(str(found["memory_growth"])) > 0.02:
        sys.exit(f"memory has grown by {found['memory_growth']:.1%}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
