"""Distributed linear models with scikit-learn's conventions, solved by ECLK.

Called like scikit-learn's own estimators, in three settings:

* in one process, as one worker (or ``workers=n`` simulated ones);
* under ``horovodrun`` after ``hvd.init()``: every rank calls ``fit`` with its own shard of the rows and
  ends with the same coefficients, those of a fit on all rows;
* on a rank that holds no example of some class: classes are gathered from all ranks.

Dense features are centred by the mean over all rows, which changes neither coefficients nor
predictions and helps the conditioning; sparse ones are left as they are.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from ..core.compressors import Compressor, Identity, TopK
from ..core.errors import ConfigurationError
from . import theory
from .eclk import ECLKState
from .network import Cluster, Network
from .problems import LinearModel, LogisticRegression, Ridge, Smoothness, smoothness
from .ranks import HorovodRanks, launched
from .run import run


@dataclass(eq=False, repr=False, kw_only=True)
class _Linear(BaseEstimator):
    """What both models share: the meeting of shards, the solver, and the decision function.

    Its fields are keyword arguments of both constructors.
    """

    fit_intercept: bool = True
    tol: float = 1e-8
    max_iter: int = 20_000
    compressor: Compressor | None = None
    workers: int | None = None
    random_state: int = 0

    def _network(self) -> Network:
        if self.workers is not None:
            return Cluster(self.workers, self.random_state)
        return HorovodRanks(self.random_state) if launched() else Cluster(1, self.random_state)

    def _solve(
        self, kind: type[LinearModel], network: Network, features: Any, targets: np.ndarray, penalty: float
    ) -> tuple[np.ndarray, float]:
        """Coefficients (d,) and intercept; ``penalty`` weighs ``|x|^2 / 2`` against the *sum* of losses."""
        if not (self.tol > 0 and self.max_iter >= 1 and np.isfinite(penalty) and penalty > 0):
            raise ConfigurationError(
                f"tol={self.tol} and the regularisation must be above 0, max_iter={self.max_iter} at least 1"
            )
        network.agree(
            features=features.shape[1], penalty=penalty, tol=self.tol, max_iter=self.max_iter,
            fit_intercept=self.fit_intercept, random_state=self.random_state,
        )  # fmt: skip
        here = len(network.ranks)
        counts = np.zeros((here, 1))
        counts[0] = features.shape[0]
        rows = round(float(network.gather(counts).sum()))
        centre = np.zeros(features.shape[1])
        if self.fit_intercept:
            if not sp.issparse(features):
                sums = np.zeros((here, features.shape[1]))
                sums[0] = features.sum(axis=0)
                centre = network.gather(sums).sum(axis=0) / rows
                features = features - centre
            ones = np.ones((features.shape[0], 1))
            features = sp.hstack([features, ones]) if sp.issparse(features) else np.hstack([features, ones])
        problem = kind(
            features, targets, l2=penalty / rows, workers=here, unpenalised=int(self.fit_intercept),
            total_rows=rows, total_workers=network.size,
        )  # fmt: skip
        x = self._minimise(problem, network, smoothness(problem, network.mean, network.gather))
        if not self.fit_intercept:
            return x, 0.0
        return x[:-1], float(x[-1] - centre @ x[:-1])

    def _minimise(self, problem: LinearModel, network: Network, constants: Smoothness) -> np.ndarray:
        d = problem.dimension
        # An unpenalised intercept has the data's curvature, which is above that of the penalty
        # wherever both classes occur; the guard of `run` stands behind this.
        constants = dataclasses.replace(constants, strong=max(constants.strong, problem.l2))
        compressor = self.compressor if self.compressor is not None else TopK(math.ceil(d / 10))
        method = theory.eclk(
            constants, compressor, d, L1=constants.mean, snapshot=Identity("float64"), refresh_only=True,
            schedule="even",
        )  # fmt: skip

        def converged(state: ECLKState) -> bool:
            return float(np.abs(state.mean_shift).max()) <= self.tol  # the gradient at the last w

        found = run(method, problem, network, self.max_iter, finished=converged)
        self.n_iter_ = found.history.rounds[-1]
        self.bits_per_worker_ = network.bits_per_worker
        if not converged(found.state):
            warnings.warn(
                f"the gradient is still above tol={self.tol:g} after {self.n_iter_} rounds; "
                "raise max_iter or tol, or scale the features",
                ConvergenceWarning,
                stacklevel=4,
            )
        return found.method.solution(found.state)

    def _margins(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", reset=False, dtype=np.float64)
        return np.asarray(X @ self.coef_.ravel()) + np.ravel(self.intercept_)[0]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


@dataclass(eq=False, repr=False)
class DistributedLogisticRegression(ClassifierMixin, _Linear):
    """Binary logistic regression over the rows of all ranks.

    Minimises ``C * sum of log(1 + exp(-y (a'w + b))) + |w|^2 / 2`` as scikit-learn's
    ``LogisticRegression`` does.

    Parameters
    ----------
    C: inverse weight of the penalty, above 0.
    fit_intercept: whether b is fitted (unpenalised) or 0.
    tol: largest entry of the gradient of the mean objective at which to stop.
    max_iter: the most communication rounds; a ``ConvergenceWarning`` where they do not suffice.
    compressor: of `hvd_adaptive.core.compressors`; None: top-k with a tenth of the coordinates.
    workers: simulate so many in this process; None: the Horovod ranks where Horovod was
        initialised with several, else one.
    random_state: seed of the shared coin and of random compressors; the same on all ranks.

    Attributes
    ----------
    coef_: (1, d).  intercept_: (1,).  classes_: (2,).  n_iter_: rounds.  bits_per_worker_: bits sent
    per worker, mean over workers.

    Raises ``ValueError`` for data that scikit-learn would refuse and for more than two classes.
    """

    C: float = 1.0

    def fit(self, X: Any, y: Any) -> DistributedLogisticRegression:
        """``X``: (rows of this rank, d), dense or sparse.  ``y``: (rows of this rank,)."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64)
        check_classification_targets(y)
        network = self._network()
        everywhere = network.gather_objects([np.unique(y)])
        self.classes_ = np.unique(np.concatenate(everywhere))
        if self.classes_.size > 2:
            raise ValueError(
                "Only binary classification is supported. The type of the target is "
                f"{type_of_target(self.classes_)}."
            )
        if self.classes_.size < 2:
            raise ValueError(f"y holds one class only, {self.classes_[0]!r}; two classes are needed")
        if not self.C > 0:
            raise ConfigurationError(f"C={self.C} must be above 0")
        targets = np.where(y == self.classes_[1], 1.0, -1.0)
        coefficients, intercept = self._solve(LogisticRegression, network, X, targets, 1.0 / self.C)
        self.coef_, self.intercept_ = coefficients[None], np.array([intercept])
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """(rows,): margins; positive means ``classes_[1]``."""
        return self._margins(X)

    def predict_proba(self, X: Any) -> np.ndarray:
        """(rows, 2): probabilities of ``classes_``."""
        margins = self._margins(X)
        return np.column_stack([expit(-margins), expit(margins)])

    def predict(self, X: Any) -> np.ndarray:
        """(rows,): the likelier class."""
        margins = self._margins(X)
        found: np.ndarray = self.classes_[(margins > 0).astype(np.int64)]
        return found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


@dataclass(eq=False, repr=False)
class DistributedRidge(RegressorMixin, _Linear):
    """Least squares with an l2 penalty over the rows of all ranks.

    Minimises ``|y - X w - b|^2 + alpha |w|^2`` as scikit-learn's ``Ridge`` does.  ``alpha`` is above 0;
    the other parameters and the attributes are those of :class:`DistributedLogisticRegression`, but
    ``coef_`` is (d,) and ``intercept_`` a number.
    """

    alpha: float = 1.0

    def fit(self, X: Any, y: Any) -> DistributedRidge:
        """``X``: (rows of this rank, d), dense or sparse.  ``y``: (rows of this rank,)."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, y_numeric=True)
        self.coef_, self.intercept_ = self._solve(
            Ridge, self._network(), X, np.asarray(y, np.float64), self.alpha
        )
        return self

    def predict(self, X: Any) -> np.ndarray:
        """(rows,): ``X w + b``."""
        return self._margins(X)
