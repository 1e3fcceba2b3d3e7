"""The TensorFlow plug-in over real Horovod: tapes, optimizers of TensorFlow 1, legacy Keras.

One launch runs many cases, since starting TensorFlow on several ranks takes longer than a case.
"""

import warnings

import numpy as np
import pytest

from hvd_adaptive.core.cost import Affine, LinkTime, PayloadBits

pytest.importorskip("tensorflow")

# Two tensors of the same shape, whose residuals must not swap, and one that goes dense.
SHAPES = {"first": (40, 40), "second": (40, 40), "bias": (40,)}
LOSSLESS = {"recipe": "topk", "ratio": 1.0}
LOSSY = {"recipe": "topk", "ratio": 0.05}
RECIPES = {
    "topk": LOSSY,
    "sampled fp16": {"recipe": "topk", "ratio": 0.05, "exact": False, "values": "fp16"},
    "warm-up": {"recipe": "topk", "ratio": 0.01, "warmup_steps": 4},
    "randk": {"recipe": "randk", "ratio": 0.1},
    "lowrank": {"recipe": "lowrank", "rank": 3},
    "sign": {"recipe": "sign"},
    "adaptive": {"recipe": "adaptive", "cost": LinkTime(PayloadBits(1), bandwidth=1e6, compute=0.05)},
}


def _variables():
    import tensorflow as tf

    rng = np.random.default_rng(7)
    return [tf.Variable(rng.normal(size=s) / 6, dtype=tf.float32, name=n) for n, s in SHAPES.items()]


def _batch(rank, step, rows=8):
    rng = np.random.default_rng(100 * step + rank)
    x = rng.normal(size=(rows, 40)).astype(np.float32)
    return x, np.sin(3 * x[:, ::-1]).astype(np.float32)


def _loss(variables, x, y):
    import tensorflow as tf

    first, second, bias = variables
    return tf.reduce_mean((tf.tanh(x @ first) @ second + bias - y) ** 2)


def _flat(tensors):
    return np.concatenate([np.asarray(t, np.float64).ravel() for t in tensors])


def _compression(config, **options):
    import horovod.tensorflow as hvd

    from hvd_adaptive.tensorflow import Compression

    if config is None:
        return hvd.Compression.none
    return Compression.from_config({**config, **options})


def _by_tape(compression, steps=6, traced=True, rate=0.5, **options):
    """Trains with a tape; gives variables, what was applied and this rank's own gradients, summed."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    variables = _variables()

    def one(x, y):
        with tf.GradientTape(persistent=True) as plain, tf.GradientTape() as tape:
            loss = _loss(variables, x, y)
        own = plain.gradient(loss, variables)
        tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(rate * gradient)
        return gradients, own

    call = tf.function(one) if traced else one
    applied, gradients = 0.0, 0.0
    for step in range(steps):
        # One rank alone meets a batch of another size, and so traces again.
        rows = 5 if step == 3 and hvd.rank() == 1 else 8
        x, y = map(tf.constant, _batch(hvd.rank(), step, rows))
        reduced, own = call(x, y)
        applied, gradients = applied + _flat(reduced), gradients + _flat(own)
    return variables, applied, gradients


def _all_equal(array):
    import horovod.tensorflow as hvd

    return len(set(hvd.allgather_object(np.asarray(array).tobytes()))) == 1


def recipes_by_tape(names):
    """For every recipe: whether replicas are equal, the identity of error feedback, and reports."""
    import horovod.tensorflow as hvd

    hvd.init()
    found = {}
    for number, name in enumerate(names):
        compression = _compression(RECIPES[name])
        variables, applied, gradients = _by_tape(compression, traced=number % 2 == 0)
        residuals = compression.residuals()
        residual = _flat([residuals["0"], residuals["1"], np.zeros(40)])
        kept = gradients - residual
        mean = np.mean(hvd.allgather_object(kept), axis=0)
        found[name] = {
            "equal": _all_equal(_flat(variables)),
            "applied": applied,
            "mean": mean,
            "residual": np.abs(residual).max(),
            "swapped": np.abs(residual[:1600] - residual[1600:3200]).max(),
            "statistics": compression.statistics(),
        }
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_recipes_by_tape(horovodrun, size):
    """T1, T16, T65."""
    names = list(RECIPES) if size == 2 else ["topk", "adaptive"]
    run = horovodrun(recipes_by_tape, names, np=size, timeout=1500)
    for rank, found in enumerate(run.results):
        for name in names:
            case, where = found[name], f"{name}, rank {rank} of {size}"
            assert case["equal"], where
            assert case["residual"] > 0, where
            assert case["swapped"] > 0, where
            # sum of what was applied = mean over ranks of (sum of gradients - residual)
            np.testing.assert_allclose(case["applied"], case["mean"], atol=2e-5, err_msg=where)
            statistics = case["statistics"]
            assert statistics.step == 6, where
            assert statistics.total.bits_dense == 6 * 32 * 3240, where
            assert statistics.sparsity["2"] == 40, where
            assert 0 < statistics.total.ratio < 0.5, where
    topk = run.results[0]["topk"]["statistics"]
    assert (topk.sparsity["0"], topk.sparsity["1"]) == (80, 80)
    adaptive = run.results[0]["adaptive"]["statistics"]
    assert adaptive.price > 0
    assert adaptive.price == run.results[1]["adaptive"]["statistics"].price


def variants_by_tape():
    """Ways to call Horovod's tape, lossless against no compression."""
    import horovod.tensorflow as hvd

    hvd.init()
    cases = {
        "average": {},
        "sum": {"op": hvd.Sum, "rate": 0.2},
        "groups": {"groups": 2},
        "predivided": {"gradient_predivide_factor": 2.0},
        "eager": {"traced": False},
    }
    found = {}
    for name, options in cases.items():
        exact, *_ = _by_tape(_compression(None), **options)
        lossless, *_ = _by_tape(_compression(LOSSLESS), **options)
        found[name] = _all_equal(_flat(lossless)), _flat(exact), _flat(lossless)
    return found


def test_variants_by_tape(horovodrun):
    for found in horovodrun(variants_by_tape, timeout=1500).results:
        for name, (equal, exact, lossless) in found.items():
            assert equal, name
            np.testing.assert_allclose(lossless, exact, atol=1e-5, err_msg=name)


def process_sets():
    import horovod.tensorflow as hvd

    sets = [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])]
    hvd.init(process_sets=sets)
    own = sets[hvd.rank() % 2]
    compression = _compression(LOSSY, process_set=own)
    variables, *_ = _by_tape(compression, steps=4, process_set=own)
    hvd.allgather_object("done")  # a rank that ends early would end Horovod for the other set
    wrong = _compression(LOSSY)  # told of all ranks, and then used over half of them
    try:
        _by_tape(wrong, steps=1, process_set=own)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    hvd.allgather_object("done")
    return _flat(variables), message


def test_process_sets(horovodrun):
    """T59."""
    results = horovodrun(process_sets, np=4, timeout=1500).results
    weights = [weights for weights, _ in results]
    assert weights[0].tobytes() == weights[2].tobytes()
    assert weights[1].tobytes() == weights[3].tobytes()
    assert np.abs(weights[0] - weights[1]).max() > 1e-3
    for _, message in results:
        assert "same process_set=" in message


def embeddings():
    """IndexedSlices: left to Horovod and exact; or made dense and compressed."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    rows = np.arange(6) * 3 + hvd.rank()

    def train(config, **options):
        table = tf.Variable(tf.ones([60, 40]))
        weight = tf.Variable(np.random.default_rng(1).normal(size=(40, 40)) / 6, dtype=tf.float32)
        compression = _compression(config)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.tanh(tf.gather(table, rows) @ weight) ** 2)
            tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
            pairs = zip([table, weight], tape.gradient(loss, [table, weight]), strict=True)
            kinds = []
            for variable, gradient in pairs:
                kinds.append(isinstance(gradient, tf.IndexedSlices))
                variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
            return kinds[0]

        for _ in range(4):
            sparse = step()
        return bool(sparse), _flat([table, weight]), compression

    exact = train(None)
    slices = train(LOSSLESS)
    dense = train(LOSSLESS, sparse_as_dense=True)
    lossy = train(LOSSY, sparse_as_dense=True)
    return (
        [exact[:2], slices[:2], dense[:2]],
        [_all_equal(case[1]) for case in (slices, dense, lossy)],
        [len(case[2].slots) for case in (slices, dense)],
    )


def test_embeddings(horovodrun):
    """T56, T58."""
    for (exact, slices, dense), equal, slots in horovodrun(embeddings, timeout=1500).results:
        assert exact[0] and slices[0] and not dense[0]
        np.testing.assert_allclose(slices[1], exact[1], atol=1e-5)
        np.testing.assert_allclose(dense[1], exact[1], atol=1e-5)
        assert all(equal)
        assert slots == [1, 2]  # slices never reach a compressor


def tensorflow_1():
    """hvd.DistributedOptimizer over an optimizer of TensorFlow 1, in a session."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    v1 = tf.compat.v1

    def train(config, steps=6, **options):
        with tf.Graph().as_default():
            variables = _variables()
            x = v1.placeholder(tf.float32, [None, 40])
            y = v1.placeholder(tf.float32, [None, 40])
            compression = _compression(config)
            optimizer = hvd.DistributedOptimizer(
                v1.train.MomentumOptimizer(0.2, 0.5), compression=compression, **options
            )
            train_op = optimizer.minimize(_loss(variables, x, y), var_list=variables)
            with v1.Session() as session:
                session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
                for step in range(steps):
                    batch = _batch(hvd.rank(), step)
                    session.run(train_op, {x: batch[0], y: batch[1]})
                report = None if config is None else compression.statistics(session)
                return _flat(session.run(variables)), report

    found = {}
    for name, options in {
        "plain": {},
        "groups": {"groups": 1},
        "passes": {"backward_passes_per_step": 2},
    }.items():
        exact, _ = train(None, **options)
        lossless, report = train(LOSSLESS, **options)
        found[name] = _all_equal(lossless), exact, lossless, report.step
    lossy, report = train({"recipe": "adaptive"})
    found["adaptive"] = _all_equal(lossy), None, None, report.step
    return found


def test_tensorflow_1(horovodrun):
    """T43."""
    for found in horovodrun(tensorflow_1, timeout=1500).results:
        for name, (equal, exact, lossless, steps) in found.items():
            assert equal, name
            assert steps == (3 if name == "passes" else 6), name
            if exact is not None:
                np.testing.assert_allclose(lossless, exact, atol=1e-5, err_msg=name)


def legacy_keras(path):
    """compile and fit of tf_keras under Horovod's own optimizer wrapper."""
    import horovod.tensorflow.keras as hvd
    import tensorflow as tf

    hvd.init()
    keras = tf.keras
    x, y = (np.concatenate([_batch(hvd.rank(), step, 10)[part] for step in range(3)]) for part in (0, 1))

    def fit(make, config, fits=1, models=1, passes=1):
        trained, compressions = [], []
        for number in range(models):
            keras.utils.set_random_seed(number)
            model = keras.Sequential(
                [keras.layers.Dense(40, "tanh", input_shape=(40,)), keras.layers.Dense(40)]
            )
            compression = _compression(config)
            optimizer = hvd.DistributedOptimizer(
                make(), compression=compression, backward_passes_per_step=passes
            )
            model.compile(optimizer=optimizer, loss="mse")
            trained.append(model)
            compressions.append(compression)
        for _ in range(fits):
            for model in trained:  # 30 rows: the last batch is smaller, and traced again
                model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
        weights = [w for model in trained for w in model.get_weights()]
        return _flat(weights), trained, compressions

    found = {}
    optimizers = keras.optimizers
    cases = {
        "adam": (lambda: optimizers.Adam(0.01), {}),
        "momentum": (lambda: optimizers.SGD(0.05, 0.9), {}),
        "passes": (lambda: optimizers.SGD(0.05), {"passes": 2}),
    }
    for name, (make, options) in cases.items():
        exact, *_ = fit(make, None, **options)
        lossless, *_ = fit(make, LOSSLESS, **options)
        found[name] = _all_equal(lossless), exact, lossless
    # Lossy, two models with a compressor each, two calls of fit.
    lossy, models, compressions = fit(lambda: optimizers.Adam(0.01), LOSSY, fits=2, models=2)
    steps = [compression.statistics().step for compression in compressions]
    file = f"{path}/{hvd.rank()}.h5"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models[0].save(file)
    again = _compression(LOSSY)
    loaded = hvd.load_model(file, compression=again)
    loaded.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    return found, _all_equal(lossy), steps, _all_equal(_flat(loaded.get_weights())), again.statistics().step


def test_legacy_keras(horovodrun, tmp_path):
    """T13, T43, T64, T65, T66."""
    for found, equal, steps, loaded, again in horovodrun(legacy_keras, str(tmp_path), timeout=1500).results:
        for name, (same, exact, lossless) in found.items():
            assert same, name
            np.testing.assert_allclose(lossless, exact, atol=1e-4, err_msg=name)
        assert equal
        assert steps == [8, 8]
        assert loaded
        assert again == 4


def nonfinite():
    """One rank's gradient is infinite at step 2: seen by all, poisons no residual, is counted."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    compression = _compression(LOSSY)

    @tf.function
    def reduce(gradient):
        return hvd.allreduce(gradient, compression=compression, name="g")

    seen = []
    for step in range(5):
        gradient = np.random.default_rng(10 * step + hvd.rank()).normal(size=(50, 40)).astype(np.float32)
        if step == 2 and hvd.rank() == 0:
            gradient[3, 3] = np.inf
        seen.append(reduce(tf.constant(gradient)).numpy())
    finite = [bool(np.isfinite(g).all()) for g in seen]
    residual = compression.residuals()["0"].numpy()
    return finite, bool(np.isfinite(residual).all()), compression.statistics(), _all_equal(seen[-1])


def test_nonfinite_gradients(horovodrun):
    for finite, residual_finite, statistics, equal in horovodrun(nonfinite).results:
        assert finite == [True, True, False, True, True]
        assert residual_finite
        assert statistics.total.nonfinite_steps == 1
        assert statistics.last.nonfinite_steps == 0
        assert equal


def refusals():
    """What cannot work: the error of each attempt as its type's name and message."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_adaptive.tensorflow import Compression

    hvd.init()

    def reducing(compression, shape=(50, 40), dtype=tf.float32, **options):
        function = tf.function(lambda g: hvd.allreduce(g, compression=compression, name="g"), **options)
        return function(tf.ones(shape, dtype))

    def other_settings():
        reducing(Compression.topk(ratio=0.01 * (1 + hvd.rank())))

    def another_model():
        compression = Compression.topk()
        reducing(compression)
        reducing(compression, (41, 40))

    def unlike_variables():
        reducing(Compression.topk([tf.Variable(tf.zeros([7, 7]), name="seven")]))

    attempts = {
        "different settings": other_settings,
        "inside a tf.function": lambda: hvd.allreduce(tf.ones([50, 40]), compression=Compression.topk()),
        "jit_compile": lambda: reducing(Compression.topk(), jit_compile=True),
        "a compressor of its own": another_model,
        "only floats": lambda: reducing(Compression.topk(), dtype=tf.int32),
        "variables=": unlike_variables,
        "did you mean 'ratio'": lambda: Compression.topk(raito=0.1),
        "overrides go by names": lambda: Compression.topk(overrides={"embedding": "none"}),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return list(attempts), messages


def test_refusals(horovodrun):
    """T31, T51."""
    for attempted, messages in horovodrun(refusals, timeout=900).results:
        assert list(messages) == attempted
        for name, message in messages.items():
            assert name in message
            assert "Error" in message.partition(":")[0]


def resume(path):
    """Six steps at once; and three, a checkpoint, and three more in fresh objects."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    cost = Affine(PayloadBits(1), per_unit=1e-6, fixed=1e-3)
    adaptive = {"recipe": "adaptive", "cost": cost, "first_ratio": 0.05}

    def fresh(config):
        variables = [tf.Variable(v) for v in _variables()]
        compressor = _compression(config)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = _loss(variables, x, y)
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(0.3 * gradient)

        checkpoint = tf.train.Checkpoint(compressor=compressor, variables=variables)
        return variables, compressor, step, checkpoint

    def train(step, numbers):
        for number in numbers:
            step(*map(tf.constant, _batch(hvd.rank(), number)))

    found = {}
    for name, config in {"topk": LOSSY, "adaptive": adaptive}.items():
        whole, compressor, step, _ = fresh(config)
        train(step, range(6))
        *_, step, checkpoint = fresh(config)
        train(step, range(3))
        saved = checkpoint.write(f"{path}/{name}-{hvd.rank()}")
        second, resumed, step, checkpoint = fresh(config)
        status = checkpoint.read(saved)
        train(step, range(3, 6))
        status.assert_consumed()
        residuals = [[r.numpy().tobytes() for r in c.residuals().values()] for c in (compressor, resumed)]
        reports = [c.statistics() for c in (compressor, resumed)]
        prices = [(r.step, r.price, r.sparsity, r.total.bits_sent) for r in reports]
        found[name] = (_flat(whole).tobytes(), _flat(second).tobytes()), residuals, prices
    return found


def test_a_checkpoint_resumes_bit_for_bit(horovodrun, tmp_path):
    """T24."""
    for found in horovodrun(resume, str(tmp_path), timeout=1500).results:
        for name, (weights, residuals, prices) in found.items():
            assert weights[0] == weights[1], name
            assert residuals[0] == residuals[1], name
            assert prices[0] == prices[1], name


def no_python():
    """Every operation of a traced compressed step, those of inner functions too."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    kinds, chains = set(), 0
    for config in ({"recipe": "adaptive"}, {"recipe": "sign"}):
        compression = _compression(config)

        @tf.function
        def step(*gradients, compression=compression):
            return [
                tf.cond(g[0, 0] > 0, lambda g=g: hvd.allreduce(g, compression=compression), lambda g=g: g)
                for g in gradients
            ]

        graph = step.get_concrete_function(*[tf.TensorSpec([50, 40])] * 3).graph
        definition = graph.as_graph_def()
        kinds |= {node.op for node in definition.node}
        kinds |= {node.op for function in definition.library.function for node in function.node_def}
        conditionals = [op for op in graph.get_operations() if op.type == "If"]
        chains += sum(len(op.control_inputs) for op in conditionals)
        assert len(conditionals) == 3
    return sorted(kinds), chains


def test_a_traced_step_runs_no_python_and_chains_nothing(horovodrun):
    for kinds, chains in horovodrun(no_python, timeout=900).results:
        assert "HorovodAllgather" in kinds
        assert not [kind for kind in kinds if "PyFunc" in kind]
        # TensorFlow would order what it takes for writers of one variable.
        assert chains == 0
