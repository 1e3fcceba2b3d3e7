"""A simulated run and a real one agree exactly, in losses and in bits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hvd_adaptive.core.cost import LinkTime, PayloadBits  # noqa: E402
from hvd_adaptive.core.recipe import adaptive, topk  # noqa: E402
from hvd_adaptive.simulation.run import Trace, train  # noqa: E402
from hvd_adaptive.simulation.tasks import task  # noqa: E402

STEPS, SEED = 10, 3


def recipes():
    # Without dense tensors and directions: Horovod's ring may add four numbers in another order.
    cost = LinkTime(PayloadBits(1), bandwidth=1e8, compute=0.02)
    return [
        topk(0.01, dense_below=0),
        topk(0.02, values="int8", dense_below=0),
        adaptive(cost=cost, dense_below=0, rank=0),
    ]


def real():
    """Losses and bits received at every step, of one rank, for each recipe."""
    import horovod.torch as hvd

    from hvd_adaptive.torch import Compressor

    hvd.init()
    torch.set_num_threads(1)
    chosen, runs = task("mlp"), []
    for recipe in recipes():
        torch.manual_seed(SEED)
        model = chosen.model()
        compressor = Compressor(recipe, model.named_parameters())
        optimizer = hvd.DistributedOptimizer(
            chosen.optimizer(list(model.parameters())),
            named_parameters=model.named_parameters(),
            compression=compressor,
        )
        stream, losses, bits = chosen.batches(hvd.rank(), SEED), [], []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = chosen.loss(model, next(stream))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            bits.append(compressor.statistics().last.bits_received)
        runs.append((losses, bits))
    return runs


def test_simulated_and_real_runs_agree(horovodrun):
    ranks = horovodrun(real, np=4, timeout=400).results
    torch.set_num_threads(1)
    for number, recipe in enumerate(recipes()):
        trace = Trace()
        for trace in train(task("mlp"), recipe, workers=4, steps=STEPS, seed=SEED):  # noqa: B007
            pass
        losses = [sum(each) / 4 for each in zip(*(rank[number][0] for rank in ranks), strict=True)]
        assert trace.train_loss == losses
        assert trace.bits == ranks[0][number][1]
