"""The estimators: scikit-learn's conventions and scikit-learn's coefficients."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.utils.estimator_checks import parametrize_with_checks

from hvd_adaptive.core.compressors import RandK, SignTopK
from hvd_adaptive.core.errors import ConfigurationError
from hvd_adaptive.solvers import data
from hvd_adaptive.solvers.estimator import DistributedLogisticRegression, DistributedRidge

CANCER = data.load("breast_cancer")
DIABETES = data.load("diabetes")


@parametrize_with_checks([DistributedLogisticRegression(), DistributedRidge()])
def test_scikit_learn_conventions(estimator, check):
    check(estimator)


def agree(ours, reference, atol=1e-6):
    np.testing.assert_allclose(ours.coef_, reference.coef_, atol=atol)
    np.testing.assert_allclose(ours.intercept_, reference.intercept_, atol=atol)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("workers", [None, 5])
@pytest.mark.parametrize("sparse", [False, True])
def test_logistic_coefficients_equal_those_of_scikit_learn(intercept, workers, sparse):
    features = CANCER.features if sparse else CANCER.features.toarray()
    labels = np.where(CANCER.targets > 0, "benign", "malignant")
    ours = DistributedLogisticRegression(C=0.1, fit_intercept=intercept, tol=1e-10, workers=workers)
    ours.fit(features, labels)
    reference = LogisticRegression(C=0.1, fit_intercept=intercept, tol=1e-12, max_iter=10_000)
    reference.fit(features, labels)
    agree(ours, reference)
    np.testing.assert_allclose(ours.predict_proba(features), reference.predict_proba(features), atol=1e-6)
    assert ours.score(features, labels) == reference.score(features, labels)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("compressor", [None, SignTopK(3), RandK(3)])
def test_ridge_coefficients_equal_those_of_scikit_learn(intercept, compressor):
    features = DIABETES.features.toarray() + 3.0  # so that the intercept matters
    ours = DistributedRidge(5.0, fit_intercept=intercept, tol=1e-10, workers=3, compressor=compressor)
    ours.fit(features, DIABETES.targets)
    agree(ours, Ridge(5.0, fit_intercept=intercept).fit(features, DIABETES.targets))


def test_too_few_rounds_are_said():
    with pytest.warns(ConvergenceWarning, match="max_iter"):
        DistributedRidge(max_iter=3).fit(DIABETES.features, DIABETES.targets)


@pytest.mark.parametrize(
    ("estimator", "word"),
    [
        (DistributedLogisticRegression(C=0.0), "C=0.0"),
        (DistributedLogisticRegression(tol=-1.0), "tol=-1"),
        (DistributedLogisticRegression(workers=10_000), "workers=10000"),
    ],
)
def test_wrong_settings_are_named(estimator, word):
    with pytest.raises(ConfigurationError, match=word):
        estimator.fit(CANCER.features, CANCER.targets)


def test_bits_sent_are_reported_and_fewer_than_a_dense_exchange():
    ours = DistributedLogisticRegression(workers=4).fit(CANCER.features, CANCER.targets)
    assert 0 < ours.bits_per_worker_ < 0.5 * 32 * 31 * ours.n_iter_
    assert sp.issparse(CANCER.features)
