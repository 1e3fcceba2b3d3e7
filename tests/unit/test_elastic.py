"""Ranks that change: who stays keeps its residual, who comes begins with none, and all agree."""

import json

import numpy as np
import pytest

from hvd_adaptive.core.cost import LinkTime, PayloadBits
from hvd_adaptive.core.elastic import Change, Presence, change
from hvd_adaptive.core.ensemble import Ensemble
from hvd_adaptive.core.numpy_backend import NUMPY
from hvd_adaptive.core.recipe import adaptive, lowrank, randk, topk

LINK = LinkTime(PayloadBits(1), bandwidth=1e5, compute=0.01)
DIMENSIONS = {"large": 900, "small": 20}
SHAPES = {**DIMENSIONS, "large": (30, DIMENSIONS["large"] // 30)}
RECIPES = {
    "topk": topk(0.02, dense_below=100),
    "topk warm-up": topk(0.02, warmup_steps=6, dense_below=100),
    "randk": randk(0.1, dense_below=100),
    "momentum": topk(0.02, memory="momentum", dense_below=100),
    "ef21": topk(0.02, memory="ef21", dense_below=100),
    "adaptive": adaptive(cost=LINK, dense_below=100),
    "lowrank": lowrank(3, dense_below=100),
}


def gradients(workers, seed):
    rng = np.random.default_rng(seed)
    return [[rng.standard_normal(d).astype(np.float32) for d in DIMENSIONS.values()] for _ in range(workers)]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_who_stays_keeps_its_residual_and_who_comes_has_none(recipe):
    before = Ensemble(NUMPY, recipe, SHAPES, 3)
    for step in range(4):
        before.reduce(gradients(3, step))
    stayed = before.workers[:2]  # the third is lost
    after = Ensemble(NUMPY, recipe, SHAPES, 4)
    after.workers[:2] = stayed
    held = [worker.residuals()["large"].copy() for worker in stayed]
    common = json.loads(json.dumps(stayed[0].common()))  # plain values only
    for rank, worker in enumerate(after.workers):
        worker.rejoin(common)
        worker.meet(range(4), rank)
    kept = [worker.residuals() for worker in after.workers]
    if recipe.memory.sends_parts:
        assert [kept[rank]["large"].tobytes() for rank in (0, 1)] == [h.tobytes() for h in held]
    else:
        assert kept[:2] == [{}, {}]
    assert kept[2:] == [{}, {}]
    prices = {worker.control(0).price for worker in after.workers}
    assert {worker.control(0).step for worker in after.workers} == {4} and len(prices) == 1
    for step in range(4, 8):  # all compare their settings, and find them equal
        last = gradients(4, step)
        found = after.reduce(last)
        assert np.isfinite(found[0]).all()
        if not recipe.memory.small:
            np.testing.assert_allclose(found[1], np.mean([g[1] for g in last], axis=0), atol=1e-5)
    assert {worker.statistics().step for worker in after.workers} == {8}


def test_a_step_that_broke_off_is_forgotten_by_going_back():
    recipe = topk(0.02, dense_below=100)
    ensemble = Ensemble(NUMPY, recipe, SHAPES, 2)
    ensemble.reduce(gradients(2, 0))
    worker = ensemble.workers[0]
    committed = worker.state()
    worker.outgoing(0, gradients(1, 1)[0][0])  # and nothing ever comes back
    worker.restore(committed, lambda _, x: x.copy())
    assert worker.idle
    assert worker.state()["residuals"]["large"].tobytes() == committed["residuals"]["large"].tobytes()


def test_what_is_lost_is_reckoned():
    assert change([Presence(0, 0), Presence(0, 0)]) == Change(0, 2, 0, 0.0)
    assert change([Presence(3, 4.0), Presence(3, 12.0)]) == Change(2, 0, 1, np.sqrt(8.0))
    assert change([Presence(2, 9.0), Presence(0, 0.0)]) == Change(1, 1, 1, 3.0)
    assert "no residual was lost" in str(change([Presence(1, 1.0), Presence(0, 0.0)]))
    assert "1 were lost" in str(change([Presence(2, 9.0), Presence(0, 0.0)]))
