"""Under Horovod each rank fits on its shard and all end with scikit-learn's coefficients."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge

from hvd_adaptive.solvers import data

FAST = {"HOROVOD_CYCLE_TIME": "0.2", "OMP_NUM_THREADS": "1"}


def fit_a_shard(framework: str):
    import importlib

    from hvd_adaptive.core.errors import SettingsMismatchError
    from hvd_adaptive.solvers.estimator import DistributedLogisticRegression, DistributedRidge

    hvd = importlib.import_module(f"horovod.{framework}")
    hvd.init()
    dataset = data.arrange(data.load("breast_cancer"), "sorted")
    start, stop = ((0, 100), (100, 569))[hvd.rank()]  # rank 0 sees one class alone
    X, y = dataset.features[start:stop].toarray(), dataset.targets[start:stop]
    labels = np.where(y > 0, "yes", "no")
    logistic = DistributedLogisticRegression(C=0.001).fit(X, labels)
    ridge = DistributedRidge(1000.0).fit(X, y)
    try:
        DistributedRidge(1.0 + hvd.rank()).fit(X, y)
    except SettingsMismatchError as error:
        mismatch = str(error)
    fitted = (logistic.coef_, logistic.intercept_, list(logistic.classes_))
    return fitted, (ridge.coef_, ridge.intercept_), mismatch


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_shards_give_the_coefficients_of_all_rows(horovodrun, framework):
    pytest.importorskip(framework)
    one, other = horovodrun(fit_a_shard, framework, np=2, env=FAST, timeout=250).results
    dataset = data.load("breast_cancer")
    X, y = dataset.features.toarray(), dataset.targets
    for (coefficients, intercept, classes), (weights, bias), mismatch in (one, other):
        logistic = LogisticRegression(C=0.001, tol=1e-12, max_iter=10_000).fit(X, y)
        np.testing.assert_allclose(coefficients, logistic.coef_, atol=1e-6)
        np.testing.assert_allclose(intercept, logistic.intercept_, atol=1e-6)
        assert classes == ["no", "yes"]
        ridge = Ridge(1000.0).fit(X, y)
        np.testing.assert_allclose(weights, ridge.coef_, atol=1e-6)
        assert bias == pytest.approx(ridge.intercept_, abs=1e-6)
        assert mismatch.startswith("penalty differs between ranks: 1, 2")
    assert (one[0][0] == other[0][0]).all() and (one[1][0] == other[1][0]).all()
