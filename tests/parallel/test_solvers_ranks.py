"""Horovod ranks and in-process workers give the same iterates and the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_adaptive.core.compressors import Dithering, Natural, RandK, SignTopK, TopK, adaptive
from hvd_adaptive.core.errors import SettingsMismatchError
from hvd_adaptive.solvers import data, theory
from hvd_adaptive.solvers.adef import ADEF
from hvd_adaptive.solvers.ef21 import EF21
from hvd_adaptive.solvers.error_compensated import ErrorCompensated
from hvd_adaptive.solvers.network import Cluster, Network
from hvd_adaptive.solvers.problems import LinearModel, LogisticRegression, Smoothness, smoothness
from hvd_adaptive.solvers.run import run

RANKS = 4
FAST = {"HOROVOD_CYCLE_TIME": "0.2", "OMP_NUM_THREADS": "1"}


def whole() -> LogisticRegression:
    dataset = data.arrange(data.load("breast_cancer"))
    return LogisticRegression(dataset.features, dataset.targets, l2=1e-2, l1=1e-3, workers=RANKS)


def methods(constants: Smoothness, d: int):
    yield theory.eclk(constants, TopK(3), d, p=0.2, L1=constants.mean)
    yield theory.eclk(constants, TopK(2, "bfloat16"), d, p=0.3, L1=constants.mean, snapshot=RandK(2))
    yield theory.eclk(constants, adaptive(d, 60.0), d, p=0.3, L1=constants.mean, batch=5)
    yield theory.eclk(constants, Dithering(3), d, p=0.3)
    yield theory.katyusha(constants, 0.3)
    gamma = 0.2 / constants.mean
    yield ErrorCompensated(gamma, SignTopK(4))
    yield ErrorCompensated(gamma, TopK(4, "float64"), RandK(3), batch=3, p=0.2)
    yield EF21(gamma, Natural())
    yield theory.accelerated_gradient_descent(constants)
    yield ADEF(constants.mean * 10, TopK(5), restart=30)


def trajectories(problem: LinearModel, networks, rounds: int = 12):
    found = []
    network: Network = next(networks)
    constants = smoothness(problem, network.mean, network.gather)
    for method, network in zip(methods(constants, problem.dimension), networks, strict=False):
        result = run(method, problem, network, rounds)
        history = result.history
        found.append((result.x.tobytes(), method.solution(result.state).tobytes(), tuple(history.bits),
                      tuple(history.objectives)))  # fmt: skip
    return found


def on_ranks(framework: str):
    from itertools import repeat

    from hvd_adaptive.solvers.ranks import HorovodRanks

    networks = (HorovodRanks(seed, framework) for seed in repeat(7))
    first = HorovodRanks(0, framework)
    return trajectories(whole().shard(first.ranks[0]), networks)


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_same_seed_same_iterates_same_bits(horovodrun, framework):
    pytest.importorskip(framework)
    expected = trajectories(whole(), iter([Cluster(RANKS, 7) for _ in range(20)]))
    assert len(expected) == 10
    assert all(np.isfinite(one[3]).all() and one[3][-1] < one[3][0] for one in expected)
    results = horovodrun(on_ranks, framework, np=RANKS, env=FAST, timeout=250).results
    for rank in range(RANKS):
        for number, (one, other) in enumerate(zip(expected, results[rank], strict=True)):
            assert one == other, f"rank {rank}, method {number}"


def disagree():
    from hvd_adaptive.solvers.ranks import HorovodRanks

    network = HorovodRanks()
    network.agree(seed=3)
    try:
        network.agree(l2=0.1 * network.ranks[0], l1=0)
    except SettingsMismatchError as error:
        return str(error)
    return None


def test_settings_that_differ_are_named_on_every_rank(horovodrun):
    results = horovodrun(disagree, np=2).results
    assert results[0] == results[1] == "l2 differs between ranks: 0, 0.1; give all the same"
