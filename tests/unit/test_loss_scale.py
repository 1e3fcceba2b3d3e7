"""Gradients in the unit of a loss scale that grows, backs off, and skips steps."""

import numpy as np
import pytest

from hvd_adaptive.core.cost import Affine, LinkTime, PayloadBits
from hvd_adaptive.core.ensemble import Ensemble
from hvd_adaptive.core.errors import ConfigurationError
from hvd_adaptive.core.numpy_backend import NUMPY
from hvd_adaptive.core.recipe import adaptive, lowrank, randk, sign, topk
from hvd_adaptive.core.worker import Worker

LINK = LinkTime(PayloadBits(1), bandwidth=1e5, compute=0.01)
FAST = LinkTime(PayloadBits(1), bandwidth=1e12, compute=0.01)  # goes dense
DIMENSIONS = {"large": 900, "other": 500, "small": 20}
SHAPES = {"large": (30, 30), "other": (20, 25), "small": (20,)}
RECIPES = {
    "topk": topk(0.02, dense_below=100),
    "topk int8": topk(0.02, values="int8", dense_below=100),
    "randk": randk(0.1, dense_below=100),
    "randk of all": randk(1.0, dense_below=100),
    "lowrank": lowrank(3, dense_below=100),
    "sign": sign(dense_below=100),
    "momentum": topk(0.02, memory="momentum", dense_below=100),
    "ef21": topk(0.02, memory="ef21", dense_below=100),
    "adaptive": adaptive(cost=LINK, dense_below=100),
    "adaptive energy": adaptive(cost=Affine(PayloadBits(1), 1.0, 1e4), objective="energy", dense_below=100),
    "adaptive dense": adaptive(cost=FAST, dense_below=100),
}
SCALES = [1024.0, 1024.0, 2048.0, 2048.0, 4096.0, 1024.0, 1024.0, 65536.0, 0.5, 0.5]


def gradients(steps=10):
    rng = np.random.default_rng(5)
    return [
        [[rng.standard_t(3, d).astype(np.float32) for d in DIMENSIONS.values()] for _ in range(2)]
        for _ in range(steps)
    ]


def scaled(step, scale):
    return [[g * np.float32(scale) for g in own] for own in step]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_scale_that_changes_by_powers_of_two_changes_no_bit(recipe):
    """T47."""
    plain, other = (Ensemble(NUMPY, recipe, SHAPES, 2) for _ in range(2))
    for step, scale in zip(gradients(), SCALES, strict=True):
        for worker in other.workers:
            worker.follow(scale)
        expected, found = plain.reduce(step), other.reduce(scaled(step, scale))
        for one, two in zip(expected, found, strict=True):
            assert one.tobytes() == (two / np.float32(scale)).tobytes()
        for one, two in zip(plain.workers, other.workers, strict=True):
            assert two.statistics().sparsity == one.statistics().sparsity
            for name, residual in one.residuals().items():
                assert residual.tobytes() == (two.residuals()[name] / np.float32(scale)).tobytes()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_state_saved_under_one_scale_goes_on_under_another(recipe):
    plain, before = (Ensemble(NUMPY, recipe, SHAPES, 2) for _ in range(2))
    steps = gradients(6)
    for step in steps[:3]:
        for worker in before.workers:
            worker.follow(256.0)
        plain.reduce(step)
        before.reduce(scaled(step, 256.0))
    after = Ensemble(NUMPY, recipe, SHAPES, 2)
    for old, new in zip(before.workers, after.workers, strict=True):
        new.restore(old.state(), lambda _, x: x.copy())
        new.follow(512.0)
    for step in steps[3:]:
        for one, two in zip(plain.reduce(step), after.reduce(scaled(step, 512.0)), strict=True):
            assert one.tobytes() == (two / np.float32(512.0)).tobytes()


@pytest.mark.parametrize("where", ["other", "small"])
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("momentum", "ef21")])
def test_a_skipped_step_loses_nothing_of_what_other_tensors_sent(name, saved, where):
    """Applied = mean of (gradients - residual) over all steps, for a tensor that is finite in all. (T47)"""
    recipe = RECIPES[name]
    ensemble = Ensemble(NUMPY, recipe, SHAPES, 2)
    applied, sums = np.zeros(900), [np.zeros(900), np.zeros(900)]
    bad = (0, 3, 4, 8)
    for number, step in enumerate(gradients(10)):
        for worker in ensemble.workers:
            worker.follow(4096.0 / 2**number)
        if number in bad:
            step[1][list(DIMENSIONS).index(where)][3] = np.inf
        found = ensemble.reduce(scaled(step, 4096.0 / 2**number))
        if number not in bad:
            applied += found[0] * 2**number / 4096.0
        dense = np.all([w.statistics().sparsity["large"] == 900 for w in ensemble.workers])
        for rank in range(2):
            # A tensor that went as it is has no residual: as without compression, a skipped step drops it.
            dropped = number in bad and dense and name == "adaptive dense"
            sums[rank] += 0 if dropped else step[rank][0]
        if saved:
            for rank, worker in enumerate(ensemble.workers):
                state = worker.state()
                ensemble.workers[rank] = Worker(NUMPY, recipe, SHAPES)
                ensemble.workers[rank].meet(range(2), rank)
                ensemble.workers[rank].restore(state, lambda _, x: x.copy())
    for worker in ensemble.workers:
        worker.follow(1.0)
        worker._reclaim_all()
        for slot in range(3):
            worker._rescale(slot)
    residuals = [worker.residuals().get("large", np.zeros(900)) for worker in ensemble.workers]
    expected = np.mean([s - r for s, r in zip(sums, residuals, strict=True)], axis=0)
    np.testing.assert_allclose(applied, expected, atol=2e-4)


def test_a_scale_that_is_none_is_refused():
    worker = Worker(NUMPY, topk(), DIMENSIONS)
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigurationError, match="a loss scale must be above 0 and finite"):
            worker.follow(scale)
