"""Hierarchical mode in TensorFlow, on two hosts with two ranks each: the same model everywhere."""

from pathlib import Path

import numpy as np
import pytest

from hvd_adaptive.core.cost import LinkTime, PayloadBits

pytest.importorskip("tensorflow")
KERAS3 = {"TF_USE_LEGACY_KERAS": "0"}
LINK = LinkTime(PayloadBits(1), bandwidth=1e6, compute=0.05)

# Two of one shape, and one that goes dense: one rank of each host speaks for two of them.
SHAPES = {"first": (40, 40), "bias": (40,), "second": (40, 40)}


def _variables(shapes=SHAPES, dtype="float32"):
    import tensorflow as tf

    rng = np.random.default_rng(7)
    return [tf.Variable(rng.normal(size=s) / 6, dtype=dtype, name=name) for name, s in shapes.items()]


def _loss(variables, x):
    import tensorflow as tf

    first, bias, second = variables
    return tf.reduce_mean((tf.tanh(x @ first + bias) @ second - tf.sin(x)[:, :1]) ** 2)


class _Training:
    """Steps of gradient descent by a tape, and the sums of what was applied and of this rank's gradients."""

    def __init__(self, compression, variables, **options):
        import horovod.tensorflow as hvd
        import tensorflow as tf

        self.variables = variables
        self.applied, self.given = (np.zeros(len(variables), object) for _ in range(2))

        @tf.function(autograph=False)  # which would wrap what is refused
        def step(x):
            with tf.GradientTape(persistent=True) as plain, tf.GradientTape() as tape:
                loss = _loss(variables, x)
            own = plain.gradient(loss, variables)
            tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
            gradients = tape.gradient(loss, variables)
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign_sub(tf.cast(0.2, variable.dtype) * gradient)
            return gradients, own

        self._step = step

    def run(self, steps, seed=0, retrace=False):
        import horovod.tensorflow as hvd
        import tensorflow as tf

        rng = np.random.default_rng(100 * seed + hvd.rank())
        for number in range(steps):
            # one rank alone meets a batch of another size, and so traces again
            rows = 8 + (retrace and number == steps - 1 and hvd.rank() == 1)
            x = tf.constant(rng.normal(size=(rows, 40)), self.variables[0].dtype)
            reduced, own = self._step(x)
            for index, (gradient, mine) in enumerate(zip(reduced, own, strict=True)):
                self.applied[index] = self.applied[index] + np.asarray(gradient, np.float64)
                self.given[index] = self.given[index] + np.asarray(mine, np.float64)
        return self


def _hierarchical(recipe, variables, op=None, **options):
    from hvd_adaptive.tensorflow import Hierarchical

    compression = Hierarchical(recipe, variables, op=op, **options)
    words = {} if op is None else {"op": op}
    return compression, _Training(compression, variables, process_set=compression.inside, **words)


def _assert_replicas_equal(variables):
    import horovod.tensorflow as hvd

    bits = b"".join(np.asarray(v).tobytes() for v in variables)
    assert len(set(hvd.allgather_object(bits))) == 1


def _assert_identity(compression, training, op):
    """applied = ``op`` over ranks of the gradients - ``op`` over hosts of the residuals."""
    import horovod.tensorflow as hvd

    residuals = {name: np.asarray(r, np.float64) for name, r in compression.residuals().items()}
    kept = hvd.allgather_object(residuals)
    gradients = hvd.allgather_object(training.given)
    for index, variable in enumerate(training.variables):
        speakers = [rank[variable.name] for rank in kept if variable.name in rank]
        assert len(speakers) == (2 if variable.shape.num_elements() >= 1024 else 0)  # one of each host
        held_back = sum(speakers, np.zeros(variable.shape.num_elements())).reshape(variable.shape)
        assert np.any(held_back) == bool(speakers)
        reduced = sum(rank[index] for rank in gradients)
        if op == hvd.Average:
            held_back, reduced = held_back / 2, reduced / 4
        np.testing.assert_allclose(training.applied[index], reduced - held_back, rtol=0, atol=2e-5)


def sums_and_resuming(folder):
    """With a pattern of a variable that one rank of a host speaks for; every rank resumes from its file."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    options = {"op": hvd.Sum, "cost": LINK, "overrides": {"second*": "sign"}}
    variables = _variables()
    compression, training = _hierarchical("adaptive", variables, **options)
    training.run(4, retrace=True)
    _assert_replicas_equal(variables)
    _assert_identity(compression, training, hvd.Sum)
    state = tf.train.Checkpoint(compressor=compression, model=variables)
    saved = state.save(f"{folder}/{hvd.rank()}/state")
    training.run(3, seed=1)

    others = _variables()
    again, training = _hierarchical("adaptive", others, **options)
    tf.train.Checkpoint(compressor=again, model=others).restore(saved)
    training.run(3, seed=1)
    for one, other in zip(variables, others, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


def keras_model_in_half_precision():
    import horovod.tensorflow as hvd
    import keras

    from hvd_adaptive.keras import DistributedOptimizer
    from hvd_adaptive.tensorflow import Hierarchical

    keras.utils.set_random_seed(0)
    half = keras.layers.Dense(60, "relu", use_bias=False, dtype="bfloat16")
    model = keras.Sequential([keras.Input((40,)), half, keras.layers.Dense(40, use_bias=False)])
    compression = Hierarchical("topk", model.trainable_variables, ratio=0.05)
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), compression, process_set=compression.inside)
    model.compile(optimizer=optimizer, loss="mse")
    rng = np.random.default_rng(hvd.rank())
    x, y = rng.normal(size=(32, 40)), rng.normal(size=(32, 40))
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    assert {v.dtype for v in model.trainable_variables} == {"bfloat16", "float32"}
    _assert_replicas_equal([keras.ops.convert_to_numpy(v) for v in model.weights])
    statistics = compression.statistics()
    assert statistics.step == 4 and 0 < statistics.total.ratio < 0.3


def refusals():
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_adaptive.core.errors import ConfigurationError, UnknownTensorError
    from hvd_adaptive.core.recipe import topk
    from hvd_adaptive.tensorflow import Hierarchical

    variables = _variables()
    with pytest.raises(ConfigurationError, match=r"op=.*Average"):
        Hierarchical("topk", variables, op=hvd.Adasum)
    with pytest.raises(ConfigurationError, match="option of a recipe's name"):
        Hierarchical(topk(0.1), variables, ratio=0.1)
    with pytest.raises(ConfigurationError, match="matches no parameter"):
        Hierarchical("topk", variables, overrides={"nothing*": "none"})
    with pytest.raises(ConfigurationError, match="outside of any function"):
        tf.function(lambda: Hierarchical("topk", variables), autograph=False)()

    compression, _ = _hierarchical("topk", variables)
    inside = {"process_set": compression.inside}
    with pytest.raises(ConfigurationError, match=r"process_set=compression\.inside"):
        _Training(compression, variables).run(1)
    with pytest.raises(ConfigurationError, match="op="):
        _Training(compression, variables, op=hvd.Sum, **inside).run(1)
    with pytest.raises(ConfigurationError, match="groups="):
        _Training(compression, variables, groups=1, **inside).run(1)
    with pytest.raises(UnknownTensorError, match=r"gradient 1 .* every variable"):
        _Training(compression, _variables({**SHAPES, "bias": (1, 40)}), **inside).run(1)

    # sparse gradients, which Horovod reduces inside the host without asking anybody
    table = tf.Variable(tf.ones([50, 40]), name="table")
    compression, _ = _hierarchical("topk", [variables[0], table])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x @ variables[0]) + tf.reduce_sum(tf.gather(table, [1, 2]))
        tape = hvd.DistributedGradientTape(tape, compression=compression, **inside)
        return tape.gradient(loss, [variables[0], table])

    with pytest.raises(tf.errors.InvalidArgumentError, match="sparse_as_dense=True"):
        step(tf.ones([8, 40]))


def run_checks(names, folder):
    import horovod.tensorflow as hvd

    hvd.init(process_sets="dynamic")
    for name in names:
        print(f"check {name}", flush=True)
        globals()[name](*([folder] if name.endswith("resuming") else []))
    return names


def test_training(horovodrun, tmp_path):
    names = [
        "sums_and_resuming",
        "keras_model_in_half_precision",
        "refusals",
    ]
    run = horovodrun(
        run_checks, names, str(tmp_path), np=4, hosts="localhost:2,127.0.0.1:2", env=KERAS3, timeout=280
    )
    assert run.results == [names] * 4


def one_host_is_dense():
    import horovod.tensorflow as hvd

    hvd.init(process_sets="dynamic")
    dense, variables = _variables(), _variables()
    _Training(hvd.Compression.none, dense).run(3)
    _, training = _hierarchical("topk", variables)
    training.run(3)
    for one, other in zip(dense, variables, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


def test_one_host_is_dense(horovodrun):
    horovodrun(one_host_is_dense)


STEPS = 5
LARGE = {"first": (40, 20000), "bias": (20000,), "second": (20000, 40)}


def bits_between_hosts():
    """By mode: bits of payload that this rank sent to other hosts, and bytes that its host sent.

    In both the replicas are equal; in hierarchical mode nothing is lost.
    """
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_adaptive.tensorflow import Compression

    hvd.init(process_sets="dynamic")
    found = {}
    for mode in ("flat", "hierarchical"):
        variables = _variables(LARGE)
        if mode == "flat":
            compression = Compression.topk(variables, ratio=0.05)
            training = _Training(compression, variables)
        else:
            compression, training = _hierarchical("topk", variables, ratio=0.05)
        training.run(1)  # while a function is traced Horovod's own talk goes on
        hvd.allreduce(tf.zeros([]), name=f"begin.{mode}")
        before = _on_link()
        training.run(STEPS, seed=1)
        hvd.allreduce(tf.zeros([]), name=f"end.{mode}")
        after = _on_link()
        _assert_replicas_equal(variables)
        if mode == "hierarchical":
            _assert_identity(compression, training, hvd.Average)
        statistics = compression.statistics()
        found[mode] = 0 if statistics is None else statistics.total.bits_sent, after - before
    return found


def _on_link():
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def test_bits_between_hosts_shrink_by_the_ranks_per_host(over_links):
    import hosts  # not on the ranks, which import this module too

    if lack := hosts.missing():
        pytest.skip(lack)
    with hosts.Hosts(2) as pair:
        ranks = over_links(pair, bits_between_hosts)
    sent = {mode: sum(rank[mode][0] for rank in ranks) for mode in ranks[0]}
    carried = {mode: sum(ranks[r][mode][1] for r in (0, 2)) for mode in ranks[0]}
    print(sent, carried)
    # two ranks per host: half of the bits, as the ranks count them; biases and ballots go dense
    assert sent["flat"] / sent["hierarchical"] == pytest.approx(2, rel=0.05)
    assert carried["flat"] > 1.8 * carried["hierarchical"]
