"""Low rank: directions that all ranks share, and when adaptive takes them instead of coordinates."""

from contextlib import nullcontext

import numpy as np
import pytest

from hvd_adaptive.core import ballot, kernels, pipeline
from hvd_adaptive.core.cost import LinkTime, PayloadBits
from hvd_adaptive.core.ensemble import Ensemble
from hvd_adaptive.core.errors import ConfigurationError
from hvd_adaptive.core.form import STEPS, Trial
from hvd_adaptive.core.lowrank import LowRank, Matrix, matrix
from hvd_adaptive.core.numpy_backend import NUMPY
from hvd_adaptive.core.policy import MORE_DIRECTIONS
from hvd_adaptive.core.recipe import adaptive, lowrank, topk
from hvd_adaptive.core.worker import Worker

ROWS, COLUMNS = 200, 240
SHAPES = {"layer": (ROWS, COLUMNS), "bias": (ROWS,)}
LINK = LinkTime(PayloadBits(1, 4), bandwidth=1e8, compute=0.01)
SLOW = LinkTime(PayloadBits(1, 4), bandwidth=1e4, compute=0.01)


def of_rank(rank, seed=0, noise=0.0):
    """A matrix of that rank, float32, flat."""
    rng = np.random.default_rng(seed)
    exact = rng.standard_normal((ROWS, rank)) @ rng.standard_normal((rank, COLUMNS))
    return (exact + noise * rng.standard_normal(exact.shape)).astype(np.float32).reshape(-1)


def spikes(seed, every=100):
    """A matrix of few coordinates in no pattern."""
    rng = np.random.default_rng(seed)
    x = 0.001 * rng.standard_normal(ROWS * COLUMNS)
    x[rng.choice(x.size, x.size // every, replace=False)] += 10 * rng.choice([-1, 1], x.size // every)
    return x.astype(np.float32)


def train(ensemble, gradient, steps, start=0):
    """Reduces ``gradient(step, worker)`` and returns what each step sent."""
    bias, sent = np.zeros(ROWS, np.float32), []
    for step in range(start, start + steps):
        count = len(ensemble.workers)
        ensemble.reduce([[gradient(step, worker).copy(), bias.copy()] for worker in range(count)])
        sent.append(ensemble.workers[0].statistics().sparsity["layer"])
    return sent


@pytest.mark.parametrize(
    "shape, expected",
    [
        ((), None),
        ((50,), None),
        ((50, 1), None),
        ((30, 40), Matrix(30, 40)),
        ((64, 32, 3, 3), Matrix(64, 288)),  # torch: outputs, inputs, kernel
        ((3, 3, 32, 64), Matrix(288, 64)),  # TensorFlow: kernel, inputs, outputs
        ((2, 3, 4000), Matrix(6, 4000)),
        ((0, 5), None),
    ],
)
def test_a_tensor_is_the_most_nearly_square_matrix(shape, expected):
    assert matrix(shape) == expected


def test_no_more_directions_than_save_something():
    assert LowRank(4).fitted((1000, 1000)).rank == 4
    assert LowRank(400).fitted((1000, 1000)).rank == 250
    assert LowRank(4).fitted((10, 10)).rank == 2
    assert LowRank(4).fitted((2, 2)) is None and LowRank(4).fitted((9,)) is None


def test_what_is_no_matrix_goes_dense():
    worker = Worker(NUMPY, lowrank(dense_below=0), SHAPES)
    assert worker.compressed == [0]


def test_a_gradient_of_low_rank_arrives_whole():
    """Orthogonal iteration finds the directions within a few steps; from then on nothing more is left."""
    ensemble = Ensemble(NUMPY, lowrank(3, dense_below=0), SHAPES, 2)
    exact = of_rank(3)
    train(ensemble, lambda step, worker: exact * (1 + worker), 6)
    before = [np.linalg.norm(worker.residuals()["layer"]) for worker in ensemble.workers]
    train(ensemble, lambda step, worker: exact * (1 + worker), 20, 6)
    for worker, left in zip(ensemble.workers, before, strict=True):
        assert np.linalg.norm(worker.residuals()["layer"]) < 1.02 * left


def test_the_values_are_the_projection_and_the_rest_is_orthogonal_to_it():
    low = LowRank(5, Matrix(ROWS, COLUMNS))
    x = of_rank(20, noise=1.0)
    for step in (2, 3):
        control = pipeline.Control(step=9, trial=Trial(step))
        values = low.project(NUMPY, x, control, 5)
        assert values.shape == ((5 * ROWS,) if step == 2 else (5 * COLUMNS,))
        sent = low.spread(NUMPY, control, values, 5)
        rest = low.less(NUMPY, x.copy(), control, values, 5)
        np.testing.assert_allclose(sent + rest, x, atol=1e-4)
        assert abs(float(sent @ rest)) < 1e-3 * float(x @ x)
        assert np.isclose(values @ values, sent @ sent, rtol=1e-4)
        room = np.ones_like(x)
        assert np.shares_memory(low.spread(NUMPY, control, values, 5, room), room)


def test_directions_stay_orthonormal_and_alike():
    ensemble = Ensemble(NUMPY, lowrank(4, dense_below=0), SHAPES, 3)
    train(ensemble, lambda step, worker: of_rank(30, 10 * step + worker), 7)
    kept = [worker.state()["directions"]["layer"] for worker in ensemble.workers]
    assert all(own.tobytes() == kept[0].tobytes() for own in kept)
    for half in (kept[0][: 4 * ROWS].reshape(4, ROWS), kept[0][4 * ROWS :].reshape(4, COLUMNS)):
        np.testing.assert_allclose(half @ half.T, np.eye(4), atol=1e-5)


def test_a_gradient_of_zeros_does_no_harm():
    """T78."""
    ensemble = Ensemble(NUMPY, lowrank(4, dense_below=0), SHAPES, 2)
    train(ensemble, lambda step, worker: np.zeros(ROWS * COLUMNS, np.float32), 4)
    exact = of_rank(2)
    train(ensemble, lambda step, worker: exact, 10, 4)
    assert np.linalg.norm(ensemble.workers[0].residuals()["layer"]) < 1e-3 * np.linalg.norm(exact)


def test_bits_do_not_grow_with_the_number_of_workers():
    received = []
    for workers in (2, 8):
        ensemble = Ensemble(NUMPY, lowrank(4, dense_below=0), SHAPES, workers)
        train(ensemble, lambda step, worker: of_rank(30, 10 * step + worker), 3)
        received.append(ensemble.workers[0].statistics().last.bits_received)
    assert received[0] == received[1]
    assert received[0] == 32 * (ballot.SIZE + 4 * COLUMNS + ROWS)  # the bias goes as it is


def test_a_nonfinite_step_teaches_nothing():
    ensemble = Ensemble(NUMPY, lowrank(4, dense_below=0), SHAPES, 2)
    train(ensemble, lambda step, worker: of_rank(30, step), 4)
    before = ensemble.workers[0].state()["directions"]["layer"]
    bad = of_rank(30)
    bad[7] = np.nan
    train(ensemble, lambda step, worker: bad if worker else of_rank(30), 1, 4)
    for worker in ensemble.workers:
        assert worker.state()["directions"]["layer"].tobytes() == before.tobytes()
        assert np.isfinite(worker.residuals()["layer"]).all()


@pytest.mark.parametrize("period", [1, 2, 3])
def test_a_matrix_that_takes_part_in_some_steps_learns_its_directions(period):
    """Heads in turn: which side is sent must not go by the steps of the model."""
    shapes = {"trunk": (ROWS, COLUMNS), "head": (ROWS, COLUMNS)}
    workers = [Worker(NUMPY, lowrank(4, dense_below=0), shapes) for _ in range(2)]
    for rank, worker in enumerate(workers):
        worker.meet([0, 1], rank)
    exact = of_rank(2)
    for step in range(12 * period):
        for slot in [0, 1] if step % period == 0 else [0]:
            ways = [worker.outgoing(slot, exact.copy()) for worker in workers]
            ring = (ways[0][0].ring + ways[1][0].ring) / np.float32(2)
            messages = None
            if workers[0].gathers(ways[0][1]):
                messages = np.concatenate([outgoing.message for outgoing, _ in ways])
            for worker, (_, context) in zip(workers, ways, strict=True):
                worker.incoming(context, ring.copy(), messages)
                worker.done(context)
    for residual in workers[0].residuals().values():
        assert np.linalg.norm(residual) < 1.5 * np.linalg.norm(exact)


@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("bad", [None, np.nan, np.inf])
def test_one_pass_over_memory_says_what_the_primitives_say(rank, bad):
    shape = (1200, 300)  # several blocks
    rng = np.random.default_rng(rank)
    gradients = [rng.standard_normal(shape).astype(np.float32) for _ in range(4)]
    workers = [Worker(NUMPY, lowrank(rank, dense_below=0), {"layer": shape}) for _ in range(2)]
    for step, gradient in enumerate(gradients):
        if bad is not None and step > 1:  # one step of either kind
            gradient[700, 20 + step] = bad
        rings = []
        for worker, without in zip(workers, (True, False), strict=True):
            worker.meet([0], 0)
            with kernels.disabled() if without else nullcontext():
                outgoing, context = worker.outgoing(0, gradient.copy())
            rings.append(outgoing.ring.copy())
            message = outgoing.message if worker.gathers(context) else None
            worker.incoming(context, rings[0].copy(), message)
            worker.done(context)
        np.testing.assert_allclose(rings[1], rings[0], rtol=1e-4, atol=1e-4)
        ours, theirs = (worker.residuals()["layer"] for worker in workers)
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
        assert np.isfinite(ours).all()


def test_a_matrix_that_is_small_for_the_link_goes_along_directions():
    """Whatever the price, and however coordinates would do: they would need an allgather."""
    link = LinkTime(PayloadBits(1, 4), bandwidth=3e7, latency=1e-3, compute=1e-4)
    ensemble = Ensemble(NUMPY, adaptive(cost=link, dense_below=0), SHAPES, 2)
    sent = train(ensemble, lambda step, worker: spikes(step), 4 * STEPS)
    assert all(values in (4 * ROWS, 4 * COLUMNS) for values in sent[STEPS:]), sent[STEPS:]


def test_short_vectors_beside_matrices_go_dense():
    assert adaptive().fitted((16_383,)).spares(16_383) and not adaptive().fitted((16_384,)).spares(16_384)
    assert not adaptive().fitted((1024, 1)).spares(1024 * 16) and not adaptive().fitted((64, 64)).spares(4096)
    assert not adaptive(rank=0).fitted((2000,)).spares(2000)
    assert not adaptive(dense_below=0).fitted((2000,)).spares(2000)


def test_gradients_of_zeros_do_not_use_up_the_trial():
    ensemble = Ensemble(NUMPY, adaptive(cost=LINK, dense_below=0), SHAPES, 2)
    train(ensemble, lambda step, worker: np.zeros(ROWS * COLUMNS, np.float32), 2 * STEPS)
    train(ensemble, lambda step, worker: of_rank(2, noise=0.01), 3 * STEPS, 2 * STEPS)
    assert ensemble.workers[0].state()["trials"]["layer"][1] > 0


def test_huge_gradients_do_not_end_in_directions_that_are_not_finite():
    ensemble = Ensemble(NUMPY, lowrank(4, dense_below=0), SHAPES, 2)
    train(ensemble, lambda step, worker: of_rank(3, step), 3)
    train(ensemble, lambda step, worker: np.full(ROWS * COLUMNS, 1e38, np.float32), 1, 3)
    for worker in ensemble.workers:
        assert np.isfinite(worker.state()["directions"]["layer"]).all()
        assert np.isfinite(worker.residuals()["layer"]).all()


@pytest.mark.parametrize("recipe", [lowrank(8, dense_below=0), topk(dense_below=0)])
def test_a_checkpoint_right_after_set_recipe_is_taken_back(recipe):
    ensemble = Ensemble(NUMPY, lowrank(4, dense_below=0), SHAPES, 2)
    train(ensemble, lambda step, worker: of_rank(3, step), 3)
    ensemble.workers[0].set_recipe(recipe)
    fresh = Worker(NUMPY, recipe, SHAPES)
    fresh.restore(ensemble.workers[0].state(), lambda _, x: x.copy())
    assert fresh.residuals()["layer"].tobytes() == ensemble.workers[0].residuals()["layer"].tobytes()


@pytest.mark.parametrize("recipe", [lowrank(4, dense_below=0), adaptive(cost=LINK, dense_below=0)])
def test_a_restored_worker_goes_on_bit_for_bit(recipe):
    ensemble = Ensemble(NUMPY, recipe, SHAPES, 2)
    train(ensemble, lambda step, worker: of_rank(3, step, 0.1), 5)
    other = Ensemble(NUMPY, recipe, SHAPES, 2)
    for fresh, old in zip(other.workers, ensemble.workers, strict=True):
        fresh.restore(old.state(), lambda _, x: x.copy())
    for step in range(5, 9):
        gradients = [[of_rank(3, step + worker, 0.1), np.ones(ROWS, np.float32)] for worker in range(2)]
        ours, theirs = (e.reduce([[x.copy() for x in own] for own in gradients]) for e in (ensemble, other))
        assert [x.tobytes() for x in ours] == [x.tobytes() for x in theirs]


@pytest.mark.parametrize("transport", ["allgather", "ring"])
def test_adaptive_takes_the_form_that_does_more(transport):
    recipe = adaptive(cost=LINK, dense_below=0, transport=transport)
    plain, few = (Ensemble(NUMPY, recipe, SHAPES, 3) for _ in range(2))
    sent = train(plain, lambda step, worker: of_rank(2, noise=0.01), 3 * STEPS)
    assert all(values % ROWS == 0 or values % COLUMNS == 0 for values in sent[1:])
    assert plain.workers[0].state()["trials"]["layer"][1] > 0
    train(few, lambda step, worker: spikes(step), 3 * STEPS)
    trials = [worker.state()["trials"]["layer"] for worker in few.workers]
    assert trials == [trials[0]] * 3 and trials[0][0] <= STEPS and not trials[0][1] > 0
    assert few.workers[0].state()["directions"].get("layer") is None or trials[0][0] == STEPS


@pytest.mark.parametrize("transport", ["allgather", "ring"])
def test_directions_that_cannot_be_afforded_are_not_tried(transport):
    ensemble = Ensemble(NUMPY, adaptive(cost=SLOW, dense_below=0, transport=transport), SHAPES, 3)
    sent = train(ensemble, lambda step, worker: of_rank(2, noise=0.01), 2 * STEPS)
    assert max(sent[4:]) < 2 * min(ROWS, COLUMNS)


@pytest.mark.parametrize("transport", ["allgather", "ring"])
@pytest.mark.parametrize("gradient", [lambda s, w: of_rank(2, w, 0.01), lambda s, w: spikes(s + w)])
def test_nothing_is_lost_by_adaptive(gradient, transport):
    ensemble = Ensemble(NUMPY, adaptive(cost=LINK, dense_below=0, transport=transport), SHAPES, 3)
    sums, applied = [np.zeros(ROWS * COLUMNS) for _ in range(3)], np.zeros(ROWS * COLUMNS)
    for step in range(3 * STEPS):
        own = [gradient(step, worker) for worker in range(3)]
        sums = [total + x for total, x in zip(sums, own, strict=True)]
        applied += ensemble.reduce([[x.copy(), np.ones(ROWS, np.float32)] for x in own])[0]
    left = [worker.residuals()["layer"] for worker in ensemble.workers]
    expected = np.mean([total - kept for total, kept in zip(sums, left, strict=True)], axis=0)
    np.testing.assert_allclose(applied, expected, atol=1e-3 * np.abs(sums[0]).max())


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_directions_cost_a_fixed_multiple_of_coordinates(workers):
    """T coordinates where they are gathered, and the directions in their place, at several prices."""
    link = LinkTime(PayloadBits(1, 4), bandwidth=1e6, compute=0.01, world_size=workers)
    recipe = adaptive(cost=link, rank=10**6).fitted((2000, 2000))
    tuned, bits = recipe.adaptive, 14
    for ratio in (0.001, 0.003, 0.01):
        control = pipeline.Control(step=2, price=1 / ratio)
        used = int(tuned.used(NUMPY, np.zeros(0), 2000 * 2000, control, bits))
        ring = used * 2000 * 32 * link.ring(link.payload).per_bit
        gathered = MORE_DIRECTIONS * ratio * 2000 * 2000 * bits * link.per_bit
        one = 2000 * 32 * link.ring(link.payload).per_bit
        assert gathered - one <= ring <= 1.001 * gathered


def test_a_checkpoint_of_another_recipe_or_rank_is_refused():
    ensemble = Ensemble(NUMPY, lowrank(4, dense_below=0), SHAPES, 1)
    train(ensemble, lambda step, worker: of_rank(3, step), 3)
    state = ensemble.workers[0].state()
    with pytest.raises(ConfigurationError, match="lowrank"):
        Worker(NUMPY, topk(dense_below=0), SHAPES).restore(state, lambda _, x: x)
    with pytest.raises(ConfigurationError, match="rank="):
        Worker(NUMPY, lowrank(5, dense_below=0), SHAPES).restore(state, lambda _, x: x)
