"""ECLKOptimizer in one process: exact optimum, resumption bit for bit, guard, refusals."""

from __future__ import annotations

import io

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sklearn.linear_model import LogisticRegression as Reference  # noqa: E402

from hvd_adaptive.core.compressors import RandK, TopK  # noqa: E402
from hvd_adaptive.core.errors import ConfigurationError  # noqa: E402
from hvd_adaptive.solvers import data, theory  # noqa: E402
from hvd_adaptive.solvers.network import Cluster  # noqa: E402
from hvd_adaptive.solvers.problems import LogisticRegression  # noqa: E402
from hvd_adaptive.solvers.run import DivergedError, DivergenceWarning  # noqa: E402
from hvd_adaptive.torch.eclk import ECLKOptimizer  # noqa: E402

L2 = 0.01
DATASET = data.load("breast_cancer")
PROBLEM = LogisticRegression(DATASET.features, DATASET.targets, l2=L2)
FEATURES = torch.from_numpy(DATASET.features.toarray())
TARGETS = torch.from_numpy(DATASET.targets)


def model(**settings):
    weight = torch.nn.Parameter(torch.zeros(10, 3, dtype=torch.float64))  # shapes do not matter
    settings = {"smoothness": PROBLEM.smoothness.mean, "strong_convexity": L2, **settings}
    optimizer = ECLKOptimizer([weight], **settings)

    def closure():
        optimizer.zero_grad()
        margins = FEATURES @ weight.reshape(-1)
        loss = torch.nn.functional.softplus(-TARGETS * margins).mean() + L2 / 2 * (weight**2).sum()
        loss.backward()
        return loss

    return weight, optimizer, closure


def test_it_reaches_the_optimum_of_scikit_learn():
    weight, optimizer, closure = model()
    losses = [optimizer.step(closure) for _ in range(1500)]
    reference = Reference(C=1 / (L2 * len(TARGETS)), fit_intercept=False, tol=1e-12, max_iter=10_000)
    reference.fit(DATASET.features, DATASET.targets)
    np.testing.assert_allclose(weight.detach().reshape(-1).numpy(), reference.coef_[0], atol=1e-6)
    assert losses[0] == pytest.approx(np.log(2.0)) and losses[-1] == pytest.approx(PROBLEM.optimum[1])


def test_its_iterates_are_those_of_the_solver():
    weight, optimizer, closure = model(compressor=TopK(4), p=0.2, seed=5)
    method = theory.eclk(PROBLEM.smoothness, TopK(4), 30, p=0.2, L1=PROBLEM.smoothness.mean)
    network = Cluster(1, 5)
    state = method.start(PROBLEM, network, np.zeros(30))
    for _ in range(100):
        optimizer.step(closure)
        state = method.step(PROBLEM, network, state)
    np.testing.assert_allclose(weight.detach().reshape(-1), method.solution(state), rtol=0, atol=1e-9)
    assert optimizer.network.bits_per_worker == network.bits_per_worker


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit():
    settings = {"compressor": RandK(5), "snapshot": TopK(9), "seed": 1}
    whole, optimizer, closure = model(**settings)
    for _ in range(70):
        optimizer.step(closure)
    _, first, closure = model(**settings)
    for _ in range(35):
        first.step(closure)
    stream = io.BytesIO()
    torch.save(first.state_dict(), stream)
    stream.seek(0)
    resumed, second, closure = model(**settings)
    second.load_state_dict(torch.load(stream, weights_only=True))
    for _ in range(35):
        second.step(closure)
    assert torch.equal(whole, resumed)
    assert second.network.bits_per_worker == optimizer.network.bits_per_worker


def test_a_smoothness_that_is_too_small_warns_and_is_raised():
    weight, optimizer, closure = model(smoothness=PROBLEM.smoothness.mean / 200)
    with pytest.warns(DivergenceWarning, match="L1="):
        for _ in range(2500):
            optimizer.step(closure)
    np.testing.assert_allclose(weight.detach().reshape(-1), PROBLEM.optimum[0], atol=1e-5)


def test_a_loss_that_is_nan_is_an_error_not_a_silent_answer():
    _, optimizer, _ = model()

    def closure():
        optimizer.zero_grad()
        return torch.tensor(float("nan"))

    with pytest.raises(DivergedError, match="starting point"):
        optimizer.step(closure)


def test_a_loss_too_steep_for_any_L1_ends_in_an_error():
    weight, optimizer, _ = model(check_every=1)

    def closure():
        optimizer.zero_grad()
        loss = 1.0 + (1e30 * weight**2).sum() - weight.sum()
        loss.backward()
        return loss

    with pytest.raises(DivergedError, match="however large"), pytest.warns(DivergenceWarning):
        for _ in range(2000):
            optimizer.step(closure)


def test_l1_and_single_precision_parameters_work():
    weight = torch.nn.Parameter(torch.zeros(30))
    optimizer = ECLKOptimizer([weight], PROBLEM.smoothness.mean, L2, l1=0.02)
    features, targets = FEATURES.float(), TARGETS.float()

    def closure():
        optimizer.zero_grad()
        loss = (
            torch.nn.functional.softplus(-targets * (features @ weight)).mean() + L2 / 2 * (weight**2).sum()
        )
        loss.backward()
        return loss

    for _ in range(800):
        optimizer.step(closure)
    expected, _ = LogisticRegression(DATASET.features, DATASET.targets, l2=L2, l1=0.02).optimum
    assert 0 < np.count_nonzero(expected) < 30
    np.testing.assert_allclose(weight.detach(), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"strong_convexity": 0.0}, "strong_convexity"),
        ({"smoothness": 1e-9}, "smoothness"),
        ({"l1": -1.0}, "l1"),
        ({"p": 2.0}, "p=2"),
    ],
)
def test_wrong_settings_are_named(settings, word):
    with pytest.raises(ConfigurationError, match=word):
        model(**settings)
