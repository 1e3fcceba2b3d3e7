"""What is carried over, against each memory's formulas, written out here in NumPy."""

import numpy as np
import pytest
import torch

from hvd_adaptive.core.ensemble import Ensemble
from hvd_adaptive.core.errors import ConfigurationError
from hvd_adaptive.core.memory import EF21, MEMORIES, ErrorFeedback, MomentumCorrection, NoMemory, named
from hvd_adaptive.core.numpy_backend import NUMPY
from hvd_adaptive.core.recipe import adaptive, from_config, randk, sign, topk
from hvd_adaptive.core.worker import Worker
from hvd_adaptive.torch.backend import TORCH

pytestmark = pytest.mark.filterwarnings("ignore:memory='none'")
DIMENSIONS = {"large": 400, "small": 30}
WORKERS, STEPS = 3, 12


def gradients(seed=0, steps=STEPS, workers=WORKERS):
    """float32 [step][worker][slot]; the gradients of one worker resemble each other, as in training."""
    rng = np.random.default_rng(seed)
    base = [[rng.standard_t(3, d) for d in DIMENSIONS.values()] for _ in range(workers)]
    return [
        [[(g + 0.3 * rng.standard_normal(len(g))).astype(np.float32) for g in own] for own in base]
        for _ in range(steps)
    ]


def largest(x, share):
    """What a top-k codec delivers of x, and where."""
    chosen = np.argsort(-np.abs(x))[: int(np.ceil(share * len(x)))]
    out = np.zeros(len(x), np.float32)
    out[chosen] = x[chosen]
    return out, chosen


def rounded(x, share):
    out, chosen = largest(x, share)
    return torch.from_numpy(out).to(torch.bfloat16).float().numpy(), chosen


def signs(x, share):
    out, chosen = largest(x, share)
    return np.sign(out) * np.abs(x[chosen]).mean(), chosen


CODECS = {
    "top-k": (lambda **o: topk(0.1, dense_below=100, **o), lambda x: largest(x, 0.1)),
    "top-k in bfloat16": (
        lambda **o: topk(0.1, values="bf16", dense_below=100, **o),
        lambda x: rounded(x, 0.1),
    ),
    "all in bfloat16": (lambda **o: topk(1.0, values="bf16", dense_below=100, **o), lambda x: rounded(x, 1)),
    "half of the signs": (lambda **o: sign(0.5, dense_below=100, **o), lambda x: signs(x, 0.5)),
    "all signs": (lambda **o: sign(dense_below=100, **o), lambda x: signs(x, 1)),
}


class Reference:
    """One worker and tensor: ``send`` gives what is sent, ``apply`` the gradient from the mean of that."""

    def __init__(self, d, codec, workers):
        self.d, self.codec, self.workers = d, codec, workers
        self.whole = codec is None
        self.v, self.u, self.h, self.g = (np.zeros(d, np.float32) for _ in range(4))

    def code(self, x):
        return (x.copy(), np.arange(self.d)) if self.whole else self.codec(x)

    def apply(self, mean):
        return mean


class Nothing(Reference):
    def send(self, g):
        return self.code(g)[0]


class Feedback(Reference):
    def send(self, g):
        x = self.v + g
        sent, _ = self.code(x)
        self.v = x - sent
        return sent


class Momentum(Reference):
    m, clip = 0.8, None

    def send(self, g):
        if self.clip is not None:
            g = g * np.float32(min(1.0, self.clip / np.sqrt(self.workers) / np.linalg.norm(g)))
        self.u = self.m * self.u + g
        self.v = self.v + self.u
        sent, where = self.code(self.v)
        self.v = self.v - sent
        if len(where) < self.d:
            self.u[where] = 0
        return sent


class Clipped(Momentum):
    clip = 5.0


class Differences(Reference):
    def send(self, g):
        sent, _ = self.code(g - self.h)
        self.h = self.h + sent
        return sent

    def apply(self, mean):
        self.g = self.g + mean
        return self.g


CASES = {
    "none": ("none", Nothing),
    "error feedback": ("error_feedback", Feedback),
    "momentum": ({"kind": "momentum", "momentum": 0.8}, Momentum),
    "clipped momentum": ({"kind": "momentum", "momentum": 0.8, "clip": 5.0}, Clipped),
    "ef21": ("ef21", Differences),
}


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("memory", CASES)
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_with_every_memory_follows_the_formulas(codec, memory, backend):
    """T28, T46."""
    setting, reference = CASES[memory]
    make, expected = CODECS[codec]
    b, convert = (NUMPY, np.copy) if backend == "numpy" else (TORCH, lambda x: torch.from_numpy(x.copy()))
    ensemble = Ensemble(b, make(memory=setting), DIMENSIONS, WORKERS)
    plain = [
        [reference(d, expected if d >= 100 else None, WORKERS) for d in DIMENSIONS.values()]
        for _ in range(WORKERS)
    ]
    for step in gradients():
        found = ensemble.reduce([[convert(g) for g in own] for own in step])
        for slot, aggregate in enumerate(found):
            sent = np.mean([plain[r][slot].send(step[r][slot]) for r in range(WORKERS)], axis=0)
            wanted = plain[0][slot].apply(sent)
            np.testing.assert_allclose(np.asarray(aggregate), wanted, atol=2e-5 * np.abs(wanted).max())
    for rank, worker in enumerate(ensemble.workers):
        for name, residual in worker.residuals().items():
            held = plain[rank][list(DIMENSIONS).index(name)]
            wanted = held.h if memory == "ef21" else held.v
            np.testing.assert_allclose(np.asarray(residual), wanted, atol=1e-4 * (1 + np.abs(wanted).max()))


@pytest.mark.parametrize("make", [lambda **o: topk(1.0, **o), lambda **o: topk(1.0, dense_below=100, **o)])
def test_where_all_is_sent_momentum_correction_is_momentum(make):
    ensemble = Ensemble(NUMPY, make(memory="momentum"), DIMENSIONS, WORKERS)
    momenta = [np.zeros(d) for d in DIMENSIONS.values()]
    for step in gradients(1):
        for slot, aggregate in enumerate(ensemble.reduce(step)):
            momenta[slot] = 0.9 * momenta[slot] + np.mean([own[slot] for own in step], axis=0)
            np.testing.assert_allclose(aggregate, momenta[slot], atol=1e-4)


@pytest.mark.parametrize("make", [randk, lambda **o: randk(dense_below=0, **o)])
def test_ef21_comes_to_the_gradient_of_a_constant_problem(make):
    (step,) = gradients(2, steps=1)
    ensemble = Ensemble(NUMPY, make(ratio=0.2, memory="ef21"), DIMENSIONS, WORKERS)
    for _ in range(90):
        found = ensemble.reduce(step)
    for slot, aggregate in enumerate(found):
        np.testing.assert_allclose(aggregate, np.mean([own[slot] for own in step], axis=0), atol=1e-4)


@pytest.mark.parametrize("memory", ["momentum", "ef21"])
@pytest.mark.parametrize("make", [topk, sign, adaptive, randk])
def test_a_step_that_does_not_count_and_a_state_that_goes_on(make, memory):
    recipe = make(memory=memory, dense_below=100)
    ensemble = Ensemble(NUMPY, recipe, DIMENSIONS, WORKERS)
    for number, step in enumerate(gradients(3, steps=6)):
        if number == 3:
            step[1][0][7] = np.inf
            before = [w._states()["large"].copy() for w in ensemble.workers]
        large, small = ensemble.reduce(step)
        assert np.isfinite(large).all() == (number != 3) and np.isfinite(small).all()
        if number == 3 and memory == "ef21":
            after = [w._states()["large"] for w in ensemble.workers]
            assert all((x == y).all() for x, y in zip(before, after, strict=True))
    for worker in ensemble.workers:
        other = Worker(NUMPY, recipe, DIMENSIONS)
        other.restore(worker.state(), lambda _, x: x.copy())
        assert {n: x.tobytes() for n, x in other._states().items()} == {
            n: x.tobytes() for n, x in worker._states().items()
        }
        with pytest.raises(ConfigurationError, match="the same memory="):
            Worker(NUMPY, make(dense_below=100), DIMENSIONS).restore(worker.state(), lambda _, x: x.copy())


def test_another_memory_goes_on_with_the_residual_or_is_refused():
    step, later = gradients(4, steps=2)
    for before, after in (
        ("momentum", "error_feedback"),
        ("error_feedback", "momentum"),
        ("momentum", "none"),
    ):
        ensemble = Ensemble(NUMPY, topk(0.1, memory=before, dense_below=100), DIMENSIONS, WORKERS)
        ensemble.reduce(step)
        held = [w.residuals()["large"].copy() for w in ensemble.workers]
        for rank, worker in enumerate(ensemble.workers):
            worker.set_recipe(topk(1.0, memory=after, dense_below=100))
            worker.meet(range(WORKERS), rank)
        (large, _) = ensemble.reduce(later)
        expected = np.mean([h + own[0] for h, own in zip(held, later, strict=True)], axis=0)
        np.testing.assert_allclose(large, expected, atol=1e-4)
    for before, after in (("ef21", "error_feedback"), ("momentum", "ef21")):
        worker = Ensemble(NUMPY, topk(0.1, memory=before, dense_below=100), DIMENSIONS, 1)
        worker.reduce(step[:1])
        with pytest.raises(ConfigurationError, match="to or from 'ef21'"):
            worker.workers[0].set_recipe(topk(0.1, memory=after, dense_below=100))


def test_memories_by_name():
    assert named("error_feedback") == ErrorFeedback() and named("ef21") == EF21()
    assert named({"kind": "momentum", "momentum": 0.5, "clip": 2}) == MomentumCorrection(0.5, 2)
    assert named(MomentumCorrection(0.7)) == MomentumCorrection(0.7)
    assert isinstance(named("none"), NoMemory)
    assert from_config({"recipe": "topk", "memory": {"kind": "momentum"}}) == topk(memory="momentum")
    assert set(MEMORIES) == {"error_feedback", "momentum", "ef21", "none"}


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ("momentun", "memory must be one of .*, not 'momentun'; did you mean 'momentum'"),
        (True, "memory must be one of"),
        ({}, "memory must be one of"),
        ({"kind": "momentum", "mass": 1}, "'momentum' takes no option 'mass'"),
        ({"kind": "momentum", "momentum": 1.0}, "momentum must be at least 0 and below 1"),
        ({"kind": "momentum", "momentum": "much"}, "momentum must be"),
        ({"kind": "momentum", "clip": 0}, "clip must be None or a norm above 0"),
    ],
)
def test_a_wrong_memory_is_named(wrong, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        named(wrong)
