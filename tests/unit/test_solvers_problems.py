"""Problems: gradients against differences, constants against dense algebra, optima against scikit-learn."""

from __future__ import annotations

import lzma

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.core.errors import ConfigurationError
from hvd_adaptive.solvers import data
from hvd_adaptive.solvers.problems import LogisticRegression, Ridge

KINDS = [LogisticRegression, Ridge]


def make(kind, rows=40, d=7, workers=3, l2=0.05, l1=0.0, seed=0, density=0.5):
    rng = np.random.default_rng(seed)
    features = sp.random(rows, d, density, format="csr", random_state=rng)
    targets = np.where(rng.random(rows) < 0.5, 1.0, -1.0)
    return kind(features, targets, l2=l2, l1=l1, workers=workers)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), workers=st.integers(1, 9))
def test_mean_of_worker_gradients_is_the_slope_of_the_loss(kind, seed, workers):
    problem = make(kind, workers=workers, seed=seed)
    rng = np.random.default_rng(seed)
    x, direction = rng.normal(size=7), rng.normal(size=7)
    step = 1e-5
    slope = (problem.loss(x + step * direction) - problem.loss(x - step * direction)) / (2 * step)
    assert problem.gradient(x) @ direction == pytest.approx(slope, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_alone_gives_the_bits_of_its_row_in_the_stack(kind):
    problem = make(kind, rows=53, workers=5)
    x = np.random.default_rng(1).normal(size=7)
    stacked = problem.gradients(x)
    for worker in range(5):
        alone = problem.shard(worker)
        assert (alone.gradients(x)[0] == stacked[worker]).all()
        assert alone.worker_spectra()[0] == problem.worker_spectra()[worker]


def test_batches_of_all_rows_equal_the_full_gradient_and_repeats_count_twice():
    problem = make(LogisticRegression, workers=3)
    x = np.random.default_rng(1).normal(size=7)
    sizes = np.diff(problem.offsets)
    full = problem.batch_gradients(x, [np.arange(m) for m in sizes])
    np.testing.assert_allclose(full, problem.gradients(x), rtol=1e-12, atol=1e-15)
    ones = [problem.batch_gradients(x, [np.full(1, i)] * 3) for i in range(min(sizes))]
    pair = problem.batch_gradients(x, [np.array([0, 1, 1])] * 3)
    np.testing.assert_allclose(pair, (ones[0] + 2 * ones[1]) / 3, rtol=1e-12)
    own = problem.batch_gradients(np.stack([x, 2 * x, x]), [np.arange(4)] * 3)
    np.testing.assert_array_equal(own[[0, 2]], problem.batch_gradients(x, [np.arange(4)] * 3)[[0, 2]])
    np.testing.assert_array_equal(own[1], problem.batch_gradients(2 * x, [np.arange(4)] * 3)[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [7, 520])
def test_constants_equal_dense_algebra(kind, d):
    problem = make(kind, rows=60, d=d, workers=4, density=0.2)
    dense, n, total = problem.features.toarray(), 4, 60
    top = np.linalg.eigvalsh(dense.T @ dense / total)
    workers = [n / total * np.linalg.norm(dense[a:b], 2) ** 2
               for a, b in zip(problem.offsets, problem.offsets[1:], strict=False)]  # fmt: skip
    row = max((dense**2).sum(axis=1)) * n / total * 15
    found, c = problem.smoothness, problem.curvature
    assert found.mean == pytest.approx(c * top[-1] + 0.05, rel=1e-7)
    assert found.worker == pytest.approx(c * max(workers) + 0.05, rel=1e-7)
    assert found.row == pytest.approx(c * row + 0.05, rel=1e-7)
    bottom = max(top[0], 0) if kind is Ridge and d <= 500 else 0.0
    assert found.strong == pytest.approx(bottom + 0.05, rel=1e-6)
    assert found.mean <= found.worker <= n * found.mean * (1 + 1e-6)
    assert found.worker <= found.row * (1 + 1e-6)


def test_optimum_of_logistic_regression_equals_scikit_learn():
    from sklearn.linear_model import LogisticRegression as Reference

    dataset = data.load("breast_cancer")
    problem = LogisticRegression(dataset.features, dataset.targets, l2=1e-2)
    x, value = problem.optimum
    reference = Reference(C=1 / (1e-2 * problem.rows), fit_intercept=False, tol=1e-12, max_iter=10_000)
    reference.fit(dataset.features, dataset.targets)
    np.testing.assert_allclose(x, reference.coef_[0], atol=1e-6)
    assert np.abs(problem.gradient(x)).max() < 1e-14
    assert value <= problem.loss(reference.coef_[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("l1", [1e-3, 2e-2, 10.0])
def test_optimum_with_l1_meets_the_optimality_conditions(kind, l1):
    problem = make(kind, rows=80, d=12, l2=1e-2, l1=l1)
    x, _ = problem.optimum
    slope = problem.gradient(x)
    active = x != 0
    assert (np.abs(slope[~active]) <= l1 * (1 + 1e-8)).all()
    np.testing.assert_allclose(slope[active], -l1 * np.sign(x[active]), rtol=1e-8)
    assert active.any() == (l1 < 1)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-5, 5), min_size=3, max_size=3), st.floats(0.01, 3))
def test_prox_minimises_its_definition(v, step):
    problem = make(Ridge, d=3, l1=0.7)
    v = np.array(v)
    u = problem.prox(v, step)

    def objective(t):
        return 0.7 * np.abs(t).sum() + ((t - v) ** 2).sum() / (2 * step)

    rng = np.random.default_rng(0)
    assert all(
        objective(u) <= objective(u + s * rng.normal(size=3)) + 1e-12
        for s in (1e-3, 0.1, 1.0)
        for _ in range(5)
    )


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"l2": -1.0}, "l2"),
        ({"l1": float("nan")}, "l1"),
        ({"workers": 50}, "workers=50"),
        ({"targets": np.ones(3)}, "targets"),
        ({"targets": np.zeros(10)}, "-1, \\+1"),
        ({"features": np.full((10, 2), np.inf)}, "finite"),
    ],
)
def test_wrong_settings_are_named(arguments, word):
    settings_ = {"features": np.eye(10, 2), "targets": np.ones(10), **arguments}
    with pytest.raises(ConfigurationError, match=word):
        LogisticRegression(**settings_)


def test_an_unregularised_logistic_problem_has_no_optimum():
    with pytest.raises(ConfigurationError, match="l2"):
        _ = make(LogisticRegression, l2=0.0).optimum


# -- data


def test_svmlight_files_load_plain_and_packed(tmp_path):
    text = b"1 1:0.5 3:2\n2 2:1\n1 1:-1\n"
    (tmp_path / "toy.svm").write_bytes(text)
    with lzma.open(tmp_path / "packed.svm.xz", "wb") as stream:
        stream.write(text)
    for name in ("toy", "packed"):
        found = data.load(name, tmp_path)
        np.testing.assert_array_equal(found.features.toarray(), [[0.5, 0, 2], [0, 1, 0], [-1, 0, 0]])
        np.testing.assert_array_equal(found.targets, [-1, 1, -1])
        assert found.name == name and found.binary
    assert data.load(tmp_path / "toy.svm").features.shape == (3, 3)


def test_the_data_folder_can_come_from_the_environment(tmp_path, monkeypatch):
    (tmp_path / "toy.svm").write_bytes(b"1 1:1\n-1 1:2\n")
    monkeypatch.setenv(data.DATA_VARIABLE, str(tmp_path))
    assert data.load("toy").targets.tolist() == [1, -1]


def test_absent_and_broken_data_give_a_plain_sentence(tmp_path):
    with pytest.raises(ConfigurationError, match="breast_cancer") as caught:
        data.load("nowhere", tmp_path)
    assert str(tmp_path) in str(caught.value)
    (tmp_path / "bad.svm").write_bytes(b"\x00\xff garbage")
    (tmp_path / "bad.svm.xz").write_bytes(b"not xz")
    (tmp_path / "empty.svm").write_bytes(b"")
    for name in ("bad.svm", "bad.svm.xz", "empty.svm"):
        with pytest.raises(ConfigurationError, match=name):
            data.load(tmp_path / name)


@pytest.mark.parametrize("name", sorted(data.BUNDLED))
def test_bundled_sets_are_clean(name):
    found = data.load(name)
    assert found.binary == (name != "diabetes")
    assert found.features.shape[0] == found.targets.size > 400
    assert np.isfinite(found.features.data).all()


def test_arranging_keeps_the_rows_together():
    dataset = data.load("digits")
    total = dataset.features.sum(axis=1)[dataset.targets > 0].sum()
    for order in ("given", "sorted", "shuffled"):
        found = data.arrange(dataset, order)
        assert found.features.sum(axis=1)[found.targets > 0].sum() == pytest.approx(total)
    assert (np.diff(data.arrange(dataset, "sorted").targets) >= 0).all()
    with pytest.raises(ConfigurationError, match="order"):
        data.arrange(dataset, "random")
