"""Directions over real Horovod: alone, and beside coordinates in the same steps."""

import numpy as np
import pytest

from hvd_adaptive.core.cost import LinkTime, PayloadBits

SHAPES = {"directions": (200, 240), "coordinates": (200, 240), "bias": (50,)}
LINK = LinkTime(PayloadBits(1, 4), bandwidth=3e8, compute=0.01)  # a given time: no clock has a say
RECIPES = {"lowrank": {"recipe": "lowrank", "rank": 3}, "adaptive": {"recipe": "adaptive", "cost": LINK}}
STEPS = 14


def _gradients(step, rank):
    """One of two directions, one of few coordinates, and a small one; float32."""
    rng = np.random.default_rng(1000 * step + rank)
    fixed = np.random.default_rng(5)
    along = fixed.standard_normal((200, 2)) @ fixed.standard_normal((2, 240))
    few = 0.001 * rng.standard_normal(200 * 240)
    few[rng.choice(few.size, few.size // 100, replace=False)] += 10.0
    parts = along * (1 + 0.1 * rank) + 0.05 * rng.standard_normal(along.shape), few, rng.standard_normal(50)
    return [x.astype(np.float32).reshape(shape) for x, shape in zip(parts, SHAPES.values(), strict=True)]


def by_torch(name):
    """Sums of what was applied and of this rank's gradients, residuals, and T of the last step."""
    import horovod.torch as hvd
    import torch

    from hvd_adaptive.torch import Compression, assert_replicas_equal

    torch.set_num_threads(1)
    hvd.init()
    model = torch.nn.Module()
    for key, shape in SHAPES.items():
        model.register_parameter(key, torch.nn.Parameter(torch.zeros(shape)))
    parameters = list(model.parameters())
    compression = Compression.from_config(model.named_parameters(), RECIPES[name])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0), model.named_parameters(), compression=compression
    )
    total = [0.0] * len(SHAPES)
    for step in range(STEPS):
        own = _gradients(step, hvd.rank())
        total = [t + x for t, x in zip(total, own, strict=True)]
        optimizer.zero_grad()
        sum((p * torch.from_numpy(x)).sum() for p, x in zip(parameters, own, strict=True)).backward()
        optimizer.step()
    assert_replicas_equal(model)
    applied = [-p.detach().numpy() for p in parameters]
    residuals = {key: value.numpy() for key, value in compression.residuals().items()}
    return applied, total, residuals, dict(compression.statistics().sparsity)


def by_tensorflow(name):
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_adaptive.tensorflow import Compression

    hvd.init()
    variables = [tf.Variable(tf.zeros(shape), name=n) for n, shape in SHAPES.items()]
    compression = Compression.from_config(RECIPES[name], variables)

    @tf.function
    def train(own):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(v * x) for v, x in zip(variables, own, strict=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(gradient)

    total = [0.0] * len(SHAPES)
    for step in range(STEPS):
        own = _gradients(step, hvd.rank())
        total = [t + x for t, x in zip(total, own, strict=True)]
        train([tf.constant(x) for x in own])
    applied = [-v.numpy() for v in variables]
    residuals = {key.split(":")[0]: np.array(value) for key, value in compression.residuals().items()}
    sparsity = {key.split(":")[0]: value for key, value in compression.statistics().sparsity.items()}
    return applied, total, residuals, sparsity


@pytest.mark.parametrize("train", [by_torch, by_tensorflow])
@pytest.mark.parametrize("name", RECIPES)
def test_directions(name, train, horovodrun):
    """Replicas are equal, nothing is lost, and adaptive gives each matrix the form that fits it."""
    if train is by_tensorflow:
        pytest.importorskip("tensorflow")
    runs = horovodrun(train, name, np=2).results
    for x, y in zip(runs[0][0], runs[1][0], strict=True):
        assert x.tobytes() == y.tobytes()
    applied = runs[0][0]
    for position, key in enumerate(SHAPES):
        kept = [total[position].reshape(-1) - residuals.get(key, 0.0) for _, total, residuals, _ in runs]
        np.testing.assert_allclose(applied[position].reshape(-1), np.mean(kept, axis=0), atol=2e-2)
    sparsity = runs[0][3]
    assert sparsity["directions"] % 200 == 0 or sparsity["directions"] % 240 == 0
    if name == "adaptive":
        assert sparsity["coordinates"] not in range(0, 200 * 240, 200)
        assert sparsity["coordinates"] not in range(0, 200 * 240, 240)


def test_what_is_simulated_is_what_horovod_does(horovodrun):
    """Bit for bit, with both forms in the same steps."""
    from hvd_adaptive.core.ensemble import Ensemble
    from hvd_adaptive.core.recipe import from_config
    from hvd_adaptive.torch.host import HOST

    ensemble = Ensemble(HOST, from_config(RECIPES["adaptive"]), SHAPES, 2)
    applied = [np.zeros(shape, np.float32) for shape in SHAPES.values()]
    for step in range(STEPS):
        means = ensemble.reduce([_gradients(step, rank) for rank in range(2)])
        applied = [x + mean.reshape(x.shape) for x, mean in zip(applied, means, strict=True)]
    run = horovodrun(by_torch, "adaptive", np=2).results[0]
    assert run[3] == dict(ensemble.workers[0].statistics().sparsity)
    for x, y in zip(applied, run[0], strict=True):
        assert x.tobytes() == y.tobytes()
