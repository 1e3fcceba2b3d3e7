"""ECLKOptimizer and its example over Horovod ranks: equal replicas, the iterates of one process's workers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from hvd_adaptive.core.compressors import RandK, TopK
from hvd_adaptive.solvers import data, theory
from hvd_adaptive.solvers.network import Cluster
from hvd_adaptive.solvers.problems import LogisticRegression

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS, ROUNDS, L2 = 2, 120, 1e-2
FAST = {"HOROVOD_CYCLE_TIME": "0.2", "OMP_NUM_THREADS": "1"}
VARIANTS = {
    "dense snapshots": {"compressor": TopK(4), "p": 0.2},
    "second compressor": {"compressor": RandK(6, value="bfloat16"), "p": 0.3, "snapshot": TopK(9)},
    "even": {"compressor": TopK(3), "p": 0.2, "snapshot": TopK(9), "schedule": "even"},
}


def whole() -> LogisticRegression:
    dataset = data.arrange(data.load("breast_cancer"), "sorted")  # ranks as unlike as can be
    return LogisticRegression(dataset.features, dataset.targets, l2=L2, workers=RANKS)


def train():
    import hashlib

    import horovod.torch as hvd
    import torch

    from hvd_adaptive.core.errors import SettingsMismatchError
    from hvd_adaptive.torch.eclk import ECLKOptimizer

    torch.set_num_threads(1)
    hvd.init()
    problem = whole()
    constants, shard = problem.smoothness, problem.shard(hvd.rank())
    features, targets = torch.from_numpy(shard.features.toarray()), torch.from_numpy(shard.targets)
    found = {}
    for name, settings in VARIANTS.items():
        weight = torch.nn.Parameter(torch.zeros(problem.dimension, dtype=torch.float64))
        optimizer = ECLKOptimizer([weight], constants.mean, L2, seed=3, check_every=7, **settings)

        def closure(weight=weight, optimizer=optimizer):
            optimizer.zero_grad()
            losses = torch.nn.functional.softplus(-targets * (features @ weight))
            loss = shard.row_weight * losses.sum() + L2 / 2 * (weight**2).sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(ROUNDS)]
        answer = weight.detach().numpy()
        digest = hashlib.sha256(answer.tobytes()).hexdigest()
        found[name] = (answer.copy(), digest, optimizer.network.bits_per_worker, losses[0])
    try:
        ECLKOptimizer([weight], constants.mean, L2, seed=hvd.rank())
    except SettingsMismatchError as error:
        mismatch = str(error)
    return found, mismatch


def test_replicas_are_equal_and_follow_the_workers_of_one_process(horovodrun):
    (one, mismatch), (other, _) = horovodrun(train, np=RANKS, env=FAST, timeout=250).results
    problem = whole()
    constants, (_, least) = problem.smoothness, problem.optimum
    for name, settings in VARIANTS.items():
        assert one[name][1:3] == other[name][1:3], name  # the same bits of the answer, and as many sent
        assert (one[name][3] + other[name][3]) / RANKS == pytest.approx(np.log(2.0)), name
        method = theory.eclk(constants, dimension=problem.dimension, L1=constants.mean, **settings)
        network = Cluster(RANKS, 3)
        state = method.start(problem, network, np.zeros(problem.dimension))
        for _ in range(ROUNDS):
            state = method.step(problem, network, state)
        np.testing.assert_allclose(one[name][0], method.solution(state), rtol=0, atol=1e-8)
        assert one[name][2] == network.bits_per_worker, name
        first = problem.loss(np.zeros(problem.dimension)) - least
        assert problem.loss(one[name][0]) - least < 1e-2 * first, name
    assert mismatch.startswith("seed differs between ranks: 0, 1")


def test_logistic_regression_by_eclk(horovodrun):
    script = EXAMPLES / "torch/logistic_eclk.py"
    run = horovodrun(script, timeout=280, env=FAST)
    said = run.output_of(0)
    assert "estimator" not in run.output_of(1)

    def number(pattern: str) -> float:
        return float(re.search(pattern, said)[1])

    assert number(r"estimator from the optimum: (\S+)") < 1e-5
    assert number(r"optimizer from the optimum: (\S+)") < 1e-3
    assert number(r"accuracy: (\S+)") > 0.97
    assert number(r"([\d.]+)% of the bits") < 50
