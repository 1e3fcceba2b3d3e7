"""TensorFlow, traced, gives what NumPy gives: T, support, message bytes and aggregate, bit for bit.

Sums over float32 (energies, norms) may be added in another order; they agree within 1e-5, and the
price, which keeps eight significant bits of them, is the same.  torch against NumPy is in
test_pipeline.py.
"""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from hvd_adaptive.core import ballot, course, pipeline, plans  # noqa: E402
from hvd_adaptive.core.cost import Affine, LinkTime, PayloadBits  # noqa: E402
from hvd_adaptive.core.form import Trial  # noqa: E402
from hvd_adaptive.core.numpy_backend import NUMPY  # noqa: E402
from hvd_adaptive.core.policy import Control  # noqa: E402
from hvd_adaptive.core.recipe import adaptive, lowrank, randk, restate, sign, topk  # noqa: E402
from hvd_adaptive.tensorflow.backend import TENSORFLOW  # noqa: E402

LINK = LinkTime(PayloadBits(1), bandwidth=1e6, compute=0.01)
DIMENSION = 700
RECIPES = {
    **{
        f"topk {kind}": topk(0.05, values=kind, dense_below=0)
        for kind in ("fp32", "fp16", "bf16", "int8", "int4")
    },
    "topk sampled": topk(0.05, exact=False, dense_below=0),
    "topk warm-up": topk(0.02, warmup_steps=3, dense_below=0),
    "randk": randk(0.1, dense_below=0),
    "sign": sign(dense_below=0),
    "sign half": sign(0.5, dense_below=0),
    "adaptive": adaptive(cost=LINK, dense_below=0),
    "adaptive sign": adaptive(cost=LINK, family="sign", dense_below=0),
    **{
        f"{name} {memory}": make(memory=memory, dense_below=0)
        for memory in ("momentum", "ef21")
        for name, make in (
            ("topk", topk),
            ("randk", randk),
            ("adaptive", lambda **o: adaptive(cost=LINK, **o)),
        )
    },
    "small momentum": topk(memory="momentum"),
}


def _gradient(step):
    rng = np.random.default_rng(step)
    x = rng.standard_normal(DIMENSION) * np.exp(rng.standard_normal(DIMENSION))
    return (np.round(x) if step == 2 else x).astype(np.float32)  # ties


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_traced_steps_are_those_of_numpy(recipe):
    plan = plans.plan(plans.choose(recipe, None, ["x"]), {"x": (DIMENSION,)}, 2, 0)["x"]
    tuned = recipe.adaptive is not None

    def control(step, price, dense):
        return Control(step=step, price=price, dense=dense) if tuned else Control(step=step)

    @tf.function(autograph=False)
    def out(gradient, residual, step, price, dense):
        return pipeline.compress(TENSORFLOW, plan, control(step, price, dense), gradient, residual)

    @tf.function(autograph=False)
    def back(ring, messages, pending, residual, step, price, dense):
        # a length that is not known while tracing, as after an allgather
        messages = tf.raw_ops.PlaceholderWithDefault(input=messages, shape=[None])
        incoming = pipeline.Incoming(ring, messages)
        return pipeline.decompress(TENSORFLOW, plan, control(step, price, dense), incoming, pending, residual)

    length = recipe.state_length(DIMENSION)
    ours, theirs = np.zeros(length, np.float32), tf.zeros([length])
    for step, price, dense in [(0, 0.0, False), (1, 50.0, False), (2, 1e-3, False), (3, 1.0, tuned)]:
        gradient, here = _gradient(step), control(step, price, dense)
        traced = tf.constant(step, tf.int64), tf.constant(price, tf.float64), tf.constant(dense)
        sent, kept, ours = pipeline.compress(NUMPY, plan, here, gradient, ours.copy())
        other, also, theirs = out(tf.constant(gradient), theirs, *traced)
        assert int(kept.sparsity) == int(also.sparsity)
        np.testing.assert_array_equal(kept.indices, also.indices)
        assert sent.message.tobytes() == other.message.numpy().tobytes()
        assert sent.ring[ballot.SIZE :].tobytes() == other.ring[ballot.SIZE :].numpy().tobytes()
        np.testing.assert_allclose(sent.ring[: ballot.SIZE], other.ring[: ballot.SIZE], rtol=1e-5)
        twice = np.concatenate([sent.message, sent.message])  # as if both ranks had sent the same
        incoming = pipeline.Incoming(sent.ring, twice)
        one, ours = pipeline.decompress(NUMPY, plan, here, incoming, kept, ours)
        two, theirs = back(tf.constant(sent.ring), tf.constant(twice), also, theirs, *traced)
        assert one.tobytes() == two.numpy().tobytes()
        assert ours.tobytes() == theirs.numpy().tobytes()


@pytest.mark.parametrize("cost", [LINK, Affine(PayloadBits(1), 1.0, 1e4)], ids=["link", "affine"])
def test_the_course_is_that_of_numpy(cost):
    tuned = restate(adaptive(cost=cost), DIMENSION, 2).adaptive
    ring = course.ring_cost(tuned, DIMENSION)
    follow = tf.function(
        lambda heading, totals: course.follow(
            TENSORFLOW, tuned, tf.constant(ring, tf.float64), heading, totals
        ),
        autograph=False,
    )
    rng = np.random.default_rng(0)
    heading = course.Heading(*np.zeros(4))
    for _ in range(200):
        sizes = rng.exponential(size=6) * 10.0 ** rng.integers(-3, 3, 6)
        sizes[4:] *= rng.random(2) < 0.7  # times that are not always known
        totals = course.Totals(*sizes)
        expected, _ = course.follow(NUMPY, tuned, np.float64(ring), heading, totals)
        traced = [type(x)(*(tf.constant(v, tf.float64) for v in x)) for x in (heading, totals)]
        found, _ = follow(*traced)
        np.testing.assert_array_equal(np.array(expected), np.array(found))
        heading = expected


@pytest.mark.parametrize(
    "recipe", [lowrank(3, dense_below=0), adaptive(cost=LINK, dense_below=0)], ids=["lowrank", "adaptive"]
)
def test_traced_directions_are_those_of_numpy(recipe):
    """But for the order in which products of matrices are summed."""
    plan = plans.plan(plans.choose(recipe, None, ["x"]), {"x": (20, DIMENSION // 20)}, 2, 0)["x"]

    def control(step, price, directions, trial):
        kind = dict(price=price) if recipe.adaptive is not None else {}
        return Control(step=step, directions=directions, trial=Trial(*trial), **kind)

    @tf.function(autograph=False)
    def out(gradient, residual, step, price, directions, trial):
        here = control(step, price, directions, tf.unstack(trial))
        return pipeline.compress(TENSORFLOW, plan, here, gradient, residual)

    @tf.function(autograph=False)
    def back(ring, messages, pending, residual, step, price, directions, trial):
        here = control(step, price, directions, tf.unstack(trial))
        ring, messages, note = (
            tf.raw_ops.PlaceholderWithDefault(input=x, shape=[None]) for x in (ring, messages, pending.note)
        )
        pending = pending._replace(note=note)
        tally = ballot.read(TENSORFLOW, ring, [0, 1], plan.fingerprint, pipeline.phase(here))
        incoming = pipeline.Incoming(ring, messages)
        aggregate, residual = pipeline.decompress(TENSORFLOW, plan, here, incoming, pending, residual)
        directions, trial = pipeline.learnt(TENSORFLOW, plan, here, ring, tally)
        return aggregate, residual, directions, tf.stack([tf.cast(x, tf.float64) for x in trial])

    low = plan.recipe.lowrank
    ours, theirs = np.zeros(DIMENSION, np.float32), tf.zeros([DIMENSION])
    mine, other = (low.start(), Trial()), (tf.constant(low.start()), tf.zeros([2], tf.float64))
    left, right = np.random.default_rng(0).standard_normal((2, 2, 35)).astype(np.float32)
    exact = left[:, :20].T @ right
    for step in range(1, 6):
        gradient = (exact + 0.1 * _gradient(step).reshape(20, 35)).reshape(-1)
        price = 5.0 + step / 4
        here = control(step, price, *mine)
        known = (tf.constant(step, tf.int64), tf.constant(price, tf.float64), *other)
        sent, kept, ours = pipeline.compress(NUMPY, plan, here, gradient, ours.copy())
        traced, also, theirs = out(tf.constant(gradient), theirs, *known)
        assert int(kept.sparsity) == int(also.sparsity) == len(sent.ring) - ballot.SIZE > 0
        np.testing.assert_allclose(sent.ring[ballot.SIZE :], traced.ring[ballot.SIZE :], atol=1e-4)
        np.testing.assert_allclose(sent.ring[: ballot.SIZE], traced.ring[: ballot.SIZE], rtol=1e-3)
        twice = np.concatenate([sent.message, sent.message])
        ring = sent.ring.copy()
        ring[ballot.SIZE - 9 : ballot.SIZE - 7] = 0.5  # as from ranks 0 and 1
        tally = ballot.read(NUMPY, ring, [0, 1], plan.fingerprint, pipeline.phase(here))
        one, ours = pipeline.decompress(NUMPY, plan, here, pipeline.Incoming(ring, twice), kept, ours)
        mine = pipeline.learnt(NUMPY, plan, here, ring, tally)
        two, theirs, *other = back(tf.constant(ring), tf.constant(twice), also, theirs, *known)
        np.testing.assert_allclose(one, two, atol=1e-4)
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
        np.testing.assert_allclose(mine[0], other[0], atol=1e-3)
        np.testing.assert_allclose(np.array(mine[1]), other[1], atol=1e-3)
