"""Keras 3 training over Horovod: replicas bit-equal, and equal to one process on the joined batch."""

import numpy as np
import pytest

pytest.importorskip("tensorflow")
KERAS3 = {"TF_USE_LEGACY_KERAS": "0"}
BATCH, EPOCHS = 8, 2


def _data(samples=64, features=8, classes=3):
    x = np.random.default_rng(0).normal(size=(samples, features)).astype(np.float32)
    y = (x @ np.random.default_rng(1).normal(size=(features, classes))).argmax(1)
    return x, y


def _share(array, rank, size, batch):
    """The rows of ``array`` that a rank sees, where all ranks together see joined batches in order."""
    steps = len(array) // (size * batch)
    parts = array[: steps * size * batch].reshape(steps, size, batch, *array.shape[1:])
    return parts[:, rank].reshape(steps * batch, *array.shape[1:])


def _network(seed=0, embedding=False):
    import keras

    keras.utils.set_random_seed(seed)
    layers = keras.layers
    if embedding:
        body = [keras.Input((4,), dtype="int32"), layers.Embedding(20, 8), layers.Flatten()]
    else:
        body = [keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(16, "relu")]
    return keras.Sequential([*body, layers.Dense(3)])


def _loss():
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _weights(model):
    return np.concatenate([w.numpy().ravel() for w in model.weights])


def _trained(optimizer, settings, rate=0.05, joined=1, embedding=False, compression=None):
    """Trains on this rank's share; gives its weights, and those of one process on joined batches."""
    import horovod.tensorflow as hvd
    import keras

    from hvd_adaptive.keras import AverageMetrics, BroadcastInitialState, DistributedOptimizer

    rank, size = hvd.rank(), hvd.size()
    x, y = _data()
    if embedding:
        x = (np.abs(x[:, :4]) * 8).astype(np.int32) % 20
    make = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}[optimizer]
    model = _network(seed=rank, embedding=embedding)
    if settings.get("groups") == "layers":
        settings = {**settings, "groups": [layer.trainable_variables for layer in model.layers[:2]]}
    distributed = DistributedOptimizer(make(rate), compression or hvd.Compression.none, **settings)
    model.compile(optimizer=distributed, loss=_loss(), metrics=["accuracy"])
    history = model.fit(
        _share(x, rank, size, BATCH),
        _share(y, rank, size, BATCH),
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[BroadcastInitialState(), AverageMetrics()],
    )
    alone = _network(seed=0, embedding=embedding)
    summed = size if settings.get("op") == hvd.Sum and optimizer == "sgd" else 1
    alone.compile(optimizer=make(rate * summed), loss=_loss(), metrics=["accuracy"])
    reference = alone.fit(x, y, batch_size=BATCH * size * joined, epochs=EPOCHS, shuffle=False, verbose=0)
    return {
        "weights": _weights(model),
        "state": [np.array(v).tobytes() for v in model.optimizer.variables],
        "alone": _weights(alone),
        "metrics": history.history,
        "reference": reference.history,
        "updates": int(model.optimizer.iterations),
        "expected": 64 // (BATCH * size * joined) * EPOCHS,
    }


def _assert_replicas(found, name):
    first = found[0][name]
    for other in found[1:]:
        assert other[name]["weights"].tobytes() == first["weights"].tobytes(), name
        assert other[name]["state"] == first["state"], name
        assert other[name]["metrics"] == first["metrics"], name
    assert first["updates"] == first["expected"], name
    return first


def ways_to_reduce():
    import horovod.tensorflow as hvd

    hvd.init()
    averaged = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    dense = {"sparse_as_dense": True, **averaged}
    predivided = {"groups": 1, "gradient_predivide_factor": 2.0}
    return {
        "plain": _trained("adam", {}),
        "groups": _trained("sgd", {"groups": 2}),
        "groups of layers": _trained("adam", {"groups": "layers"}),
        "sum": _trained("sgd", {"op": hvd.Sum}),
        "predivided": _trained("adam", {"gradient_predivide_factor": 2.0}),
        "passes": _trained("adam", averaged, joined=2),
        "embedding": _trained("adam", {}, embedding=True),
        "embedding in groups": _trained("adam", predivided, embedding=True),
        "embedding in passes": _trained("sgd", dense, joined=2, embedding=True),
    }


def test_equals_one_process_on_the_joined_batch(horovodrun):
    """T66, T68."""
    found = horovodrun(ways_to_reduce, env=KERAS3, timeout=1500).results
    for name in found[0]:
        first = _assert_replicas(found, name)
        np.testing.assert_allclose(first["weights"], first["alone"], atol=2e-6, err_msg=name)
        np.testing.assert_allclose(
            first["metrics"]["loss"], first["reference"]["loss"], rtol=1e-4, err_msg=name
        )


def compressed(log_dir):
    """Horovod's fp16 and this package's recipes; two models with a compressor each."""
    import horovod.tensorflow as hvd
    import keras

    from hvd_adaptive.keras import BroadcastInitialState, Compression, DistributedOptimizer, LogCompression

    hvd.init()
    small = {"dense_below": 64}
    passes = {"sparse_as_dense": True, "backward_passes_per_step": 2, "average_aggregated_gradients": True}
    found = {
        "topk": _trained("sgd", {}, compression=Compression.topk(ratio=0.2, **small)),
        "adaptive": _trained("sgd", {"groups": 1}, compression=Compression.adaptive(**small)),
        "lossless": _trained("adam", {}, compression=Compression.topk(ratio=1.0, **small)),
        "fp16": _trained("adam", {}, compression=hvd.Compression.fp16),
        "embedding in passes": _trained(
            "sgd", passes, joined=2, embedding=True, compression=Compression.topk(ratio=1.0, **small)
        ),
    }
    x, y = _data()
    rows = slice(hvd.rank(), None, hvd.size())
    models, compressors = [], []
    for seed in (1, 2):
        model = _network(seed=seed)
        compressor = Compression.topk(model.trainable_variables, ratio=0.2, **small)
        model.compile(optimizer=DistributedOptimizer(keras.optimizers.Adam(), compressor), loss=_loss())
        models.append(model)
        compressors.append(compressor)
    for _ in range(2):  # two calls of fit; 7 rows leave a smaller last batch, which is traced again
        for model in models:
            logged = [BroadcastInitialState(), LogCompression(log_dir, every=1)]
            model.fit(x[rows], y[rows], batch_size=7, epochs=1, verbose=0, callbacks=logged)
    return found, [_weights(m) for m in models], [c.statistics() for c in compressors]


def test_compression(horovodrun, tmp_path):
    """T64, T76. (T44)"""
    import tensorflow as tf

    run = horovodrun(compressed, str(tmp_path), env=KERAS3, timeout=1500)
    found = [result[0] for result in run.results]
    for name in found[0]:
        _assert_replicas(found, name)
    for name in ("lossless", "embedding in passes"):
        np.testing.assert_allclose(found[0][name]["weights"], found[0][name]["alone"], atol=2e-6)
    assert np.abs(found[0]["fp16"]["weights"] - found[0]["fp16"]["alone"]).max() < 0.02
    for _, weights, statistics in run.results:
        for own, other in zip(weights, run.results[0][1], strict=True):
            assert own.tobytes() == other.tobytes()
        assert [s.step for s in statistics] == [2 * -(-64 // 2 // 7)] * 2
        assert all(0.2 < s.total.ratio < 1 for s in statistics)
        assert any("kernel" in name for name in statistics[0].sparsity)
    written = [
        value.tag
        for file in tmp_path.glob("events*")
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    ]
    assert {"compression/ratio", "compression/price", "compression/bits_sent"} <= set(written)
    assert any(tag.startswith("sparsity/") and "kernel" in tag for tag in written)


def halves():
    """Two process sets that train apart."""
    import horovod.tensorflow as hvd
    import keras

    from hvd_adaptive.keras import BroadcastInitialState, DistributedOptimizer

    sets = [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])]
    hvd.init(process_sets=sets)
    own = sets[hvd.rank() % 2]
    x, y = _data()
    model = _network(seed=hvd.rank())
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=own)
    model.compile(optimizer=optimizer, loss=_loss())
    rows = slice(hvd.rank(), None, 4)
    root = own.ranks[0]
    model.fit(x[rows], y[rows], epochs=2, verbose=0, callbacks=[BroadcastInitialState(root, own)])
    hvd.allgather_object("done")  # a rank that ends early would end Horovod for the other set
    return _weights(model)


def test_process_sets(horovodrun):
    weights = horovodrun(halves, np=4, env=KERAS3, timeout=900).results
    assert weights[0].tobytes() == weights[2].tobytes()
    assert weights[1].tobytes() == weights[3].tobytes()
    assert np.abs(weights[0] - weights[1]).max() > 0.01


def save_and_resume(path):
    """Trains four epochs; and two, then from the saved file two more."""
    import horovod.tensorflow as hvd
    import keras

    from hvd_adaptive.keras import DistributedOptimizer

    hvd.init()
    x, y = _data()
    rows = slice(hvd.rank(), None, hvd.size())
    options = dict(batch_size=8, shuffle=False, verbose=0)

    def fresh():
        model = _network(seed=0)
        model.compile(optimizer=DistributedOptimizer(keras.optimizers.Adam(0.01)), loss=_loss())
        return model

    whole = fresh()
    whole.fit(x[rows], y[rows], epochs=4, **options)
    first = fresh()
    first.fit(x[rows], y[rows], epochs=2, **options)
    file = f"{path}/{hvd.rank()}.keras"
    first.save(file)
    loaded = keras.models.load_model(file)
    plain = type(loaded.optimizer) is keras.optimizers.Adam
    loaded.compile(optimizer=DistributedOptimizer(loaded.optimizer), loss=_loss())
    loaded.fit(x[rows], y[rows], epochs=2, **options)
    return plain, int(loaded.optimizer.iterations), _weights(whole), _weights(loaded)


def loss_scaling():
    """float16 compute; the first batch of rank 0 overflows, so that all ranks must skip it."""
    import horovod.tensorflow as hvd
    import keras

    from hvd_adaptive.keras import BroadcastInitialState, DistributedOptimizer

    hvd.init()
    keras.config.set_dtype_policy("mixed_float16")
    x, y = _data()
    rows = slice(hvd.rank(), None, hvd.size())
    x = x[rows].copy()
    if hvd.rank() == 0:
        x[:8] = np.inf
    model = _network(seed=hvd.rank())
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), dynamic_growth_steps=2)
    model.compile(optimizer=DistributedOptimizer(scaled), loss=_loss())
    broadcast = BroadcastInitialState()
    model.fit(x, y[rows], batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=[broadcast])
    return _weights(model), float(model.optimizer.dynamic_scale), int(model.optimizer.iterations)


def eagerly_and_in_long_steps():
    """run_eagerly=True, and several steps in one execution: the same weights as plain fit."""
    import horovod.tensorflow as hvd
    import keras

    from hvd_adaptive.keras import DistributedOptimizer

    hvd.init()
    x, y = _data()
    rows = slice(hvd.rank(), None, hvd.size())
    weights = []
    for compiled in ({}, {"run_eagerly": True}, {"steps_per_execution": 2}):
        model = _network(seed=0)
        model.compile(optimizer=DistributedOptimizer(keras.optimizers.Adam(0.01)), loss=_loss(), **compiled)
        model.fit(x[rows], y[rows], batch_size=8, epochs=2, shuffle=False, verbose=0)
        weights.append(_weights(model))
    return weights


def warmed_up():
    import horovod.tensorflow as hvd
    import keras

    from hvd_adaptive.keras import DistributedOptimizer, WarmUpLearningRate

    hvd.init()
    x, y = _data(samples=32)
    rates = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    model = _network()
    model.compile(optimizer=DistributedOptimizer("sgd"), loss=_loss())
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[WarmUpLearningRate(0.4, 1, 4), Watch()])
    return rates


def refusals():
    """The messages of what cannot work; each is (error's name, message)."""
    import horovod.tensorflow as hvd
    import keras

    from hvd_adaptive.keras import DistributedOptimizer

    hvd.init()
    x, y = _data()

    def compiled(**options):
        model = _network()
        model.compile(optimizer=DistributedOptimizer("sgd"), loss=_loss(), **options)
        model.fit(x, y, verbose=0)

    def in_loss_scale():
        keras.optimizers.LossScaleOptimizer(DistributedOptimizer("sgd"))

    attempts = {
        "jit_compile": lambda: compiled(jit_compile=True),
        "LossScaleOptimizer": in_loss_scale,
        "already": lambda: DistributedOptimizer(DistributedOptimizer("sgd")),
        "compression": lambda: DistributedOptimizer("sgd", 0.01),
        "op": lambda: DistributedOptimizer("sgd", op=hvd.Adasum),
        "groups": lambda: DistributedOptimizer("sgd", groups=0),
        "backward_passes_per_step": lambda: DistributedOptimizer("sgd", backward_passes_per_step=0),
        "gradient_predivide_factor": lambda: DistributedOptimizer("sgd", gradient_predivide_factor=-1),
        "op=hvd.Average": lambda: DistributedOptimizer("sgd", op=hvd.Sum, gradient_predivide_factor=2),
        "Keras 3": lambda: DistributedOptimizer(object()),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except Exception as error:
            messages[name] = (type(error).__name__, str(error))
    return messages, list(attempts)


def in_turn(path):
    return {
        "resume": save_and_resume(path),
        "eager": eagerly_and_in_long_steps(),
        "rates": warmed_up(),
        "refusals": refusals(),
        "scaled": loss_scaling(),
    }


def test_saving_loops_rates_and_refusals(horovodrun, tmp_path):
    """T51, T54."""
    results = horovodrun(in_turn, str(tmp_path), env=KERAS3, timeout=1500).results
    for found in results:
        plain, updates, whole, resumed = found["resume"]
        assert plain  # a saved model loads with a plain optimizer, and resumes bit for bit
        assert updates == 16
        assert whole.tobytes() == resumed.tobytes()

        plain, eager, long = found["eager"]
        np.testing.assert_allclose(eager, plain, atol=1e-6)
        np.testing.assert_allclose(long, plain, atol=1e-6)
        assert plain.tobytes() == results[0]["eager"][0].tobytes()

        np.testing.assert_allclose(found["rates"], [0.2, 0.25, 0.3, 0.35, *[0.4] * 4], rtol=1e-6)

        messages, attempted = found["refusals"]
        assert list(messages) == attempted
        for name, (kind, message) in messages.items():
            assert kind == "ConfigurationError"
            assert name in message

        weights, scale, updates = found["scaled"]
        assert np.isfinite(weights).all()
        assert weights.tobytes() == results[0]["scaled"][0].tobytes()
        assert (scale, updates) == (2.0**15, 3)  # halved once, then doubled after two good steps


def import_it():
    try:
        import hvd_adaptive.keras  # noqa: F401
    except Exception as error:
        return type(error).__name__, str(error)


def test_another_keras_backend_is_refused(horovodrun):
    """T67."""
    env = {**KERAS3, "KERAS_BACKEND": "torch"}
    kind, said = horovodrun(import_it, np=1, env=env, timeout=900).results[0]
    assert kind == "ConfigurationError"
    assert "KERAS_BACKEND=tensorflow" in said
