"""Algorithms: identities, exact linear convergence, floors, and the guard against divergence."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from hvd_adaptive.core.compressors import Dithering, Identity, Natural, RandK, SignTopK, TopK, adaptive
from hvd_adaptive.core.errors import ConfigurationError
from hvd_adaptive.solvers import theory
from hvd_adaptive.solvers.eclk import ECLK
from hvd_adaptive.solvers.ef21 import EF21
from hvd_adaptive.solvers.error_compensated import ErrorCompensated
from hvd_adaptive.solvers.gradient_descent import GradientDescent
from hvd_adaptive.solvers.network import Cluster
from hvd_adaptive.solvers.problems import LogisticRegression, Ridge
from hvd_adaptive.solvers.run import DivergedError, DivergenceWarning, run

D, WORKERS = 12, 5


def least_squares(condition=100.0, l1=0.0, heterogeneity=1.0, rows=60, d=D, workers=WORKERS, seed=0):
    """Ridge whose Hessian has the given condition number and whose workers disagree."""
    rng = np.random.default_rng(seed)
    u, _ = np.linalg.qr(rng.normal(size=(rows, d)))
    v, _ = np.linalg.qr(rng.normal(size=(d, d)))
    features = u * np.sqrt(rows * np.geomspace(1.0, 1.0 / condition, d)) @ v.T
    targets = features @ rng.normal(size=d) + heterogeneity * rng.normal(size=rows)
    return Ridge(features, targets, l1=l1, workers=workers)


PROBLEM = least_squares()
CONSTANTS = PROBLEM.smoothness
LEAST = PROBLEM.optimum[1]


def solve(method, problem=PROBLEM, rounds=4000, target=1e-10, seed=0, **settings):
    least = problem.optimum[1]
    network = Cluster(problem.workers, seed)
    found = run(
        method, problem, network, rounds, stop=lambda history: history.gaps(least)[-1] <= target, **settings
    )
    return found, found.history.gaps(least).min()


def test_the_constructed_problem_has_its_condition_number():
    assert CONSTANTS.condition == pytest.approx(100.0, rel=1e-6)


COMPRESSORS = [
    *(TopK(2), TopK(2, "bfloat16"), RandK(3), SignTopK(4)),
    *(Dithering(3), Natural(), adaptive(D, 60.0), Identity()),
]


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@pytest.mark.parametrize("variant", ["dense snapshots", "second compressor"])
def test_eclk_with_parameters_from_theory_converges_linearly(compressor, variant):
    snapshot = None if variant == "dense snapshots" else compressor
    method = theory.eclk(CONSTANTS, compressor, D, snapshot=snapshot, p=0.2)
    found, gap = solve(method, rounds=30_000)
    assert gap <= 1e-10 and not found.history.rescues


def test_virtual_iterates_are_those_of_uncompressed_katyusha_at_a_perturbed_point():
    """papers.md 2.4: z - ebar/(1 + s) obeys the uncompressed recursion."""
    method = theory.eclk(CONSTANTS, TopK(2), D, p=0.3, L1=CONSTANTS.mean)
    network = Cluster(WORKERS)
    state = method.start(PROBLEM, network, np.ones(D))
    pull, step = method.eta * method.sigma1, method.eta / method.L1
    for _ in range(50):
        following = method.step(PROBLEM, network, state)
        gradient = PROBLEM.gradients(state.x).mean(axis=0)  # g + G in the paper's letters
        before = state.z - state.error.mean(axis=0) / (1 + pull)
        after = following.z - following.error.mean(axis=0) / (1 + pull)
        x = state.x - state.error.mean(axis=0) / (1 + pull)
        np.testing.assert_allclose((1 + pull) * after, pull * x + before - step * gradient, rtol=0, atol=1e-9)
        state = following


@pytest.mark.parametrize("p", [0.3, 0.25, 1.0])
def test_even_snapshots_move_every_so_many_rounds_to_where_y_was(p):
    method = theory.eclk(CONSTANTS, TopK(2), D, p=p, L1=CONSTANTS.mean, schedule="even")
    network = Cluster(WORKERS)
    state, moves = method.start(PROBLEM, network, np.ones(D)), []
    for count in range(1, 13):
        following = method.step(PROBLEM, network, state)
        if following.age == 0:
            moves.append(count)
            np.testing.assert_array_equal(following.w, state.y)
            np.testing.assert_array_equal(following.snapshot_gradient, PROBLEM.gradients(state.y))
        else:
            np.testing.assert_array_equal(following.w, state.w)
        state = following
    assert moves == {0.3: [3, 6, 9, 12], 0.25: [4, 8, 12], 1.0: list(range(1, 13))}[p]


@pytest.mark.parametrize("snapshot", [None, TopK(3)])
def test_even_snapshots_need_no_more_rounds_than_the_coin_does(snapshot):
    def build(schedule):
        return theory.eclk(
            CONSTANTS, TopK(2), D, p=0.1, snapshot=snapshot, L1=CONSTANTS.mean, schedule=schedule
        )

    rounds = [solve(build("coin"), seed=seed)[0].history.rounds[-1] for seed in range(5)]
    found, gap = solve(build("even"))
    assert gap <= 1e-10 and found.history.rounds[-1] <= np.mean(rounds)


def test_error_feedback_loses_nothing():
    """Over any number of rounds: sum of what was applied = sum of targets - final error."""
    gamma = 0.1 / CONSTANTS.mean
    method, network = ErrorCompensated(gamma, SignTopK(2)), Cluster(WORKERS)
    state = method.start(PROBLEM, network, np.zeros(D))
    wanted = np.zeros(D)
    for _ in range(100):
        wanted += gamma * PROBLEM.gradients(state.x).mean(axis=0)
        state = method.step(PROBLEM, network, state)
    np.testing.assert_allclose(-state.x, wanted - state.error.mean(axis=0), atol=1e-10)


def test_katyusha_is_eclk_with_the_identity():
    one, gap = solve(theory.katyusha(CONSTANTS, 0.2))
    assert gap <= 1e-10
    other, _ = solve(theory.eclk(CONSTANTS, Identity(), D, p=0.2, L1=one.method.L1))
    np.testing.assert_array_equal(one.x, other.x)


def test_ec_gd_stalls_and_the_learned_shift_removes_the_floor():
    gamma = 0.25 / CONSTANTS.mean
    _, floor = solve(ErrorCompensated(gamma, TopK(2)))
    _, exact = solve(ErrorCompensated(gamma, TopK(2), shift=RandK(2)))
    assert exact <= 1e-10 < 1e-6 < floor


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (theory.gradient_descent(CONSTANTS), "GD"),
        (theory.accelerated_gradient_descent(CONSTANTS), "AGD"),
        (theory.ef21(CONSTANTS, TopK(3), D), "EF21"),
        (EF21(0.5 / CONSTANTS.mean, TopK(3)), "EF21"),
        (EF21(0.5 / CONSTANTS.mean, TopK(3), first=TopK(3)), "EF21"),
        (theory.error_compensated(CONSTANTS, TopK(3), D, shift=RandK(3), scale=2), "EC-GD-DIANA"),
        (theory.adef(CONSTANTS, TopK(3), D, scale=10), "ADEF"),
    ],
)
def test_baselines_converge_exactly(method, name):
    found, gap = solve(method, rounds=20_000, target=1e-8)
    assert method.name == name and gap <= 1e-8 and not found.history.rescues


def test_variance_reduction_with_mini_batches_converges_exactly_and_plain_batches_do_not():
    problem = least_squares(5.0, workers=3)
    constants = problem.smoothness
    compressor, gamma = TopK(6), 0.5 / constants.row
    reduced = ErrorCompensated(gamma, compressor, RandK(6), batch=4, p=0.2)
    assert reduced.name == "EC-LSVRG-DIANA"
    assert solve(reduced, problem, target=1e-8)[1] <= 1e-8
    plain = ErrorCompensated(gamma, compressor, RandK(6), batch=4)
    assert plain.name == "EC-SGD-DIANA"
    assert solve(plain, problem, rounds=2000)[1] > 1e-6
    eclk = theory.eclk(constants, compressor, D, p=0.2, batch=4)
    assert solve(eclk, problem, target=1e-8)[1] <= 1e-8


def test_the_composite_problem_is_solved_with_its_zeros():
    problem = least_squares(l1=0.3)
    x, _ = problem.optimum
    assert 0 < np.count_nonzero(x) < D
    for snapshot in (None, TopK(3)):
        method = theory.eclk(problem.smoothness, TopK(3), D, p=0.25, snapshot=snapshot)
        found, gap = solve(method, problem, rounds=20_000, target=1e-12)
        assert gap <= 1e-12
        np.testing.assert_allclose(found.x, x, atol=1e-4)


def rounds_to(method, problem, target=1e-8):
    found, gap = solve(method, problem, rounds=60_000, target=target, rescue=False)
    assert gap <= target
    return found.history.rounds[-1]


def test_eclk_accelerates_and_ef21_does_not():
    conditions = np.array([100.0, 1000.0, 10_000.0, 30_000.0])
    eclk, ef21 = [], []
    for condition in conditions:
        problem = least_squares(condition)
        constants = problem.smoothness
        eclk.append(rounds_to(theory.eclk(constants, TopK(3), D, p=0.25, L1=constants.mean), problem))
        if condition <= 1000:
            ef21.append(rounds_to(EF21(1 / constants.mean, TopK(3)), problem))
    slope = np.polyfit(np.log(conditions), np.log(eclk), 1)[0]
    assert slope <= 0.55
    assert np.log(ef21[1] / ef21[0]) / np.log(10) >= 0.9


def test_a_diverging_run_warns_raises_L1_and_still_converges():
    method = ECLK(TopK(2), L1=CONSTANTS.mean / 500, theta1=0.5, sigma1=0.1, p=0.5)
    with pytest.warns(DivergenceWarning, match="L1="):
        found, gap = solve(method, rounds=20_000)
    assert gap <= 1e-10 and found.method.L1 > method.L1 and found.history.rescues
    assert np.isfinite(found.history.objectives).all()


EXTREMES = [1e3, 1e40, 1e300]


@pytest.mark.parametrize("gamma", EXTREMES)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_no_step_is_so_large_that_a_run_ends_in_a_silent_nan(compressor, gamma):
    methods = [
        EF21(gamma, compressor),
        EF21(gamma, compressor, first=compressor),
        ErrorCompensated(gamma, compressor, shift=RandK(3)),
        GradientDescent(gamma),
        ECLK(compressor, 1 / gamma, 0.5, 0.1, 0.5, snapshot=compressor),
        theory.adef(CONSTANTS, compressor, D, scale=gamma),
    ]
    for method in methods:
        stopped, _ = solve(method, rounds=400, rescue=False)
        assert stopped.history.diverged and np.isfinite(stopped.x).all(), method
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)
            try:
                found, _ = solve(method, rounds=400)
            except DivergedError:
                continue
        assert found.history.rescues, method
        assert np.isfinite(found.x).all() and np.isfinite(found.history.objectives).all(), method


def test_a_start_without_a_finite_objective_is_refused():
    with pytest.raises(DivergedError, match="starting point"):
        run(theory.gradient_descent(CONSTANTS), PROBLEM, Cluster(WORKERS), 5, x=np.full(D, 1e200))


def test_a_diverging_run_without_rescue_says_so_and_one_beyond_help_raises():
    found, _ = solve(EF21(1e3, TopK(2)), rescue=False)
    assert found.history.diverged
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)
        with pytest.raises(DivergedError):
            solve(GradientDescent(1e300), rounds=10_000)


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    method = theory.eclk(CONSTANTS, RandK(3), D, p=0.3, batch=4)
    runs = [solve(method, rounds=60, seed=seed)[0] for seed in (3, 3, 4)]
    assert runs[0].x.tobytes() == runs[1].x.tobytes() != runs[2].x.tobytes()


def test_bits_are_those_of_the_messages_snapshots_included():
    method = ECLK(TopK(2), CONSTANTS.mean, 0.1, 0.01, p=1.0)
    network = Cluster(WORKERS)
    run(method, PROBLEM, network, 10)
    sparse = TopK(2).compress(np.ones(D), np.random.default_rng(0)).bits
    assert network.bits_per_worker == 10 * (32 * D + sparse)


def test_a_thousand_workers():
    problem = least_squares(rows=2048, workers=1024)
    constants = problem.smoothness
    _, gap = solve(theory.eclk(constants, TopK(3), D, p=0.25, L1=constants.mean), problem, 1500, 1e-6)
    assert gap <= 1e-6


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: ECLK(TopK(1), -1.0, 0.1, 0.1, 0.1), "L1=-1"),
        (lambda: ECLK(TopK(1), 1.0, 0.1, 0.1, 0.0), "p=0"),
        (lambda: ECLK(TopK(1), 1.0, 0.1, 0.1, 0.1, schedule="odd"), "schedule='odd'"),
        (lambda: EF21(float("nan"), TopK(1)), "gamma=nan"),
        (lambda: GradientDescent(1.0, 2.0), "momentum=2"),
        (lambda: Cluster(2000), "workers=2000"),
        (lambda: theory.eclk(LogisticRegression(np.eye(3), np.ones(3)).smoothness, TopK(1), 3), "l2"),
    ],
)
def test_wrong_settings_are_named(make, word):
    with pytest.raises(ConfigurationError, match=word):
        make()
