"""What others' users ran into, tried on the TensorFlow plug-in: see docs/reliability.md.

All checks run in one launch; each trains through a traced function, as Horovod's tape does.
"""

import numpy as np
import pytest

pytest.importorskip("tensorflow")


def _trainer(variables, loss, compression, rate=0.1, **options):
    import horovod.tensorflow as hvd
    import tensorflow as tf

    @tf.function
    def step(*batch):
        with tf.GradientTape() as tape:
            value = loss(*batch)
        tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
        for variable, gradient in zip(variables, tape.gradient(value, variables), strict=True):
            variable.assign_sub(tf.cast(rate * tf.convert_to_tensor(gradient), variable.dtype))

    return step


def _equal(variables):
    import horovod.tensorflow as hvd

    bits = b"".join(np.asarray(v, np.float64).tobytes() for v in variables)
    return len(set(hvd.allgather_object(bits))) == 1


def _made(shape, seed=0, dtype="float32"):
    import tensorflow as tf

    return tf.Variable(np.random.default_rng(seed).normal(size=shape) / 6, dtype=dtype)


def groups_with_an_embedding():
    """Sparse and dense gradients in groups, left alone or made dense, against no compression. (T38)"""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_adaptive.tensorflow import Compression

    rows = np.arange(6) * 3 + hvd.rank()
    for as_dense in (True, False):
        trained = []
        for compression in (hvd.Compression.none, Compression.topk(ratio=1.0)):
            variables = [_made((60, 40)), _made((40, 40), 1), _made((40, 40), 2)]

            def loss(variables=variables):
                table, one, two = variables
                return tf.reduce_sum(tf.tanh(tf.tanh(tf.gather(table, rows) @ one) @ two) ** 2)

            # Stock Horovod's own groups fail on IndexedSlices unless these are made dense.
            options = {"groups": 2} if as_dense else {}
            step = _trainer(variables, loss, compression, sparse_as_dense=as_dense, **options)
            for _ in range(4):
                step()
            assert _equal(variables)
            trained.append(variables)
        for one, two in zip(*trained, strict=True):
            np.testing.assert_allclose(one, two, atol=1e-5)


def gradients_of_any_type():
    """T21."""
    import tensorflow as tf

    from hvd_adaptive.tensorflow import Compression

    for dtype, make in (
        *(("bfloat16", make) for make in (Compression.topk, Compression.randk, Compression.sign)),
        *(("float16", Compression.topk), ("float64", Compression.topk)),
    ):
        compression = make(ratio=0.2)
        variables = [_made((40, 40), 1, dtype), _made((40,), 2, dtype)]

        def loss(variables=variables):
            return tf.reduce_sum((variables[0] @ variables[1][:, tf.newaxis] - 1) ** 2)

        step = _trainer(variables, loss, compression, rate=0.01)
        first = float(loss())
        for _ in range(6):
            step()
        assert float(loss()) < first and variables[0].dtype.name == dtype
        assert _equal(variables) and compression.residuals()["0"].dtype == tf.float32


def shapes_that_are_not_known():
    """A batch of unknown length is no matter; a gradient of unknown shape is refused. (T35)"""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_adaptive.tensorflow import Compression

    weight = _made((40, 40))
    compression = Compression.topk(ratio=0.1)

    @tf.function(input_signature=[tf.TensorSpec([None, 40])])
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weight) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        weight.assign_sub(0.1 * tape.gradient(loss, [weight])[0])

    for number in range(4):
        step(tf.ones([number + 1 + hvd.rank(), 40]))
    assert _equal([weight]) and compression.statistics().step == 4

    @tf.function(input_signature=[tf.TensorSpec([None, 40])])
    def reduce(gradient):
        return hvd.allreduce(gradient, compression=Compression.topk(), name="unknown")

    with pytest.raises(Exception, match=r"ConfigurationError: .*needs shapes that are known"):
        reduce(tf.ones([50, 40]))


def adasum():
    """Refused by us, or by a Horovod that was built without MPI and has no Adasum. (T54)"""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_adaptive.tensorflow import Compression

    compression = Compression.topk()
    reduce = tf.function(lambda g: hvd.allreduce(g, op=hvd.Adasum, compression=compression, name="adasum"))
    with pytest.raises(Exception, match=r"No Adasum operation enabled|which no compressor here preserves"):
        reduce(tf.ones([50, 40]) * (1.0 + hvd.rank()))


def memories():
    """Momentum where all is sent is momentum SGD; where little is sent, replicas are equal. (T46)"""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_adaptive.tensorflow import Compression

    target = np.random.default_rng(hvd.rank()).normal(size=(40, 40)).astype(np.float32)
    mean = np.mean(hvd.allgather_object(target), axis=0)

    def train(compression, steps):
        variables = [tf.Variable(tf.zeros([40, 40])), tf.Variable(tf.zeros([40]))]

        def loss():
            return 0.5 * tf.reduce_sum((variables[0] + variables[1] - target) ** 2)

        step = _trainer(variables, loss, compression, rate=0.01)
        for _ in range(steps):
            step()
        assert _equal(variables)
        return variables

    found = train(Compression.topk(ratio=1.0, memory="momentum"), 6)
    large, small, u, v = np.zeros((40, 40)), np.zeros(40), np.zeros((40, 40)), np.zeros(40)
    for _ in range(6):
        gradient = large + small - mean
        u, v = 0.9 * u + gradient, 0.9 * v + gradient.sum(0)
        large, small = large - 0.01 * u, small - 0.01 * v
    np.testing.assert_allclose(found[0], large, atol=1e-4)
    np.testing.assert_allclose(found[1], small, atol=1e-4)
    for make, memory in (
        (Compression.topk, {"kind": "momentum", "clip": 1.0}),
        (Compression.sign, "ef21"),
        (Compression.randk, "ef21"),
    ):
        large, small = train(make(ratio=0.1, memory=memory), 15)
        assert np.square(large.numpy() + small.numpy() - mean).sum() < np.square(mean).sum()


CHECKS = [
    "groups_with_an_embedding",
    "gradients_of_any_type",
    "shapes_that_are_not_known",
    "adasum",
    "memories",
]


def run_checks(*names):
    import horovod.tensorflow as hvd

    hvd.init()
    passed = []
    for name in names:
        print(f"check {name}", flush=True)
        globals()[name]()
        passed.append(name)
    return passed


def test_at_two_ranks(horovodrun):
    run = horovodrun(run_checks, *CHECKS, timeout=280)
    assert run.results == [CHECKS] * 2
