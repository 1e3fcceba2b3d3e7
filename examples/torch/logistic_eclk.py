"""Logistic regression on real data over several processes, twice: an estimator, and a PyTorch optimizer.

    horovodrun -np 4 python examples/torch/logistic_eclk.py --data breast_cancer

Each rank keeps its own shard of the rows.  The estimator is used as any of scikit-learn's; the optimizer
trains a PyTorch model whose loss is convex.  Both send sparse messages through Horovod's allgather and end
at the optimum that one machine would find on all rows.
"""

from __future__ import annotations

import click
import horovod.torch as hvd
import numpy as np
import torch
from torch.nn.functional import softplus

from hvd_adaptive.solvers.data import arrange, load, split
from hvd_adaptive.solvers.estimator import DistributedLogisticRegression
from hvd_adaptive.solvers.network import Network
from hvd_adaptive.solvers.problems import LogisticRegression, smoothness
from hvd_adaptive.solvers.ranks import HorovodRanks
from hvd_adaptive.torch.eclk import ECLKOptimizer


def say(message: str) -> None:
    if hvd.rank() == 0:
        print(message, flush=True)


def train(problem: LogisticRegression, network: Network, rounds: int) -> torch.Tensor:
    """The same objective as a PyTorch model, by ECLKOptimizer."""
    constants = smoothness(problem, network.mean, network.gather)
    features = torch.from_numpy(problem.features.toarray())
    targets = torch.from_numpy(problem.targets)
    weight = torch.nn.Parameter(torch.zeros(problem.dimension, dtype=torch.float64))
    optimizer = ECLKOptimizer([weight], constants.mean, constants.strong)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        losses = softplus(-targets * (features @ weight))
        loss = problem.row_weight * losses.sum() + problem.l2 / 2 * (weight**2).sum()
        loss.backward()
        return loss

    for count in range(rounds):
        loss = optimizer.step(closure)
        if count % (rounds // 5) == 0:
            say(f"  round {count:5}: loss on rank 0 {loss:.6f}")
    dense = 32 * problem.dimension * rounds
    say(f"  {optimizer.network.bits_per_worker / dense:.1%} of the bits of dense gradients in float32")
    return weight.detach()


@click.command()
@click.option("--data", default="breast_cancer", show_default=True, help="A name or an svmlight file.")
@click.option("--l2", default=1e-2, show_default=True)
@click.option("--rounds", default=600, show_default=True, help="Of the optimizer.")
def main(data: str, l2: float, rounds: int) -> None:
    """Run it under horovodrun; with one process it works as well."""
    hvd.init()
    dataset = arrange(load(data))
    rows = dataset.targets.size
    bounds = split(rows, hvd.size())
    mine = slice(bounds[hvd.rank()], bounds[hvd.rank() + 1])
    features, targets = dataset.features[mine], dataset.targets[mine]

    estimator = DistributedLogisticRegression(C=1 / (l2 * rows), fit_intercept=False).fit(features, targets)
    say(f"estimator: {estimator.n_iter_} rounds, {estimator.bits_per_worker_ / 1e3:.0f} kbit per rank")

    problem = LogisticRegression(features, targets, l2=l2, total_rows=rows, total_workers=hvd.size())
    weight = train(problem, HorovodRanks(), rounds)

    exact, _ = LogisticRegression(dataset.features, dataset.targets, l2=l2).optimum
    say(f"estimator from the optimum: {np.abs(estimator.coef_[0] - exact).max():.1e}")
    say(f"optimizer from the optimum: {np.abs(weight.numpy() - exact).max():.1e}")
    say(f"accuracy: {(np.sign(dataset.features @ estimator.coef_[0]) == dataset.targets).mean():.4f}")


if __name__ == "__main__":
    main()
