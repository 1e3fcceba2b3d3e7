r"""Regularised linear models whose rows are dealt to workers.

.. math::
    P(x) = \frac1n \sum_{\tau=1}^n f^{(\tau)}(x) + \lambda_1 \|x\|_1, \qquad
    f^{(\tau)}(x) = \frac nN \sum_{i\in\text{shard }\tau} \ell(a_i^\top x, b_i) + \frac{\lambda_2}2\|x\|^2 .

Each row carries the weight n/N, so that the mean over workers is the mean over all N rows
whatever the sizes of the shards.  All arrays are float64.

Every worker's gradient comes from the same two CSR products, whether its shard is stored
alone or stacked with those of other workers: ``A @ x`` and a product with the transpose that
was laid out per worker beforehand.  Both add the terms of an entry in row order, so the two
give the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.linalg
import scipy.sparse as sp
import scipy.sparse.linalg as spla
from scipy.special import expit

from ..core.errors import ConfigurationError
from . import data

_DENSE_LIMIT = 1500  # dimension up to which a d x d matrix is formed by one process
_GRAM_LIMIT = 500  # the same for the matrix of all workers, formed column by column


@dataclass(frozen=True)
class Smoothness:
    """Constants of the smooth part, regulariser included (papers.md 2.1).

    ``mean``: L_f of the mean f; ``worker``: the largest L of an f^(tau) (L-bar); ``row``: the
    largest L of one summand of an f^(tau); ``strong``: mu, strong convexity of f.
    """

    mean: float
    worker: float
    row: float
    strong: float

    @property
    def condition(self) -> float:
        """kappa = L_f / mu (infinite where mu is 0)."""
        return self.mean / self.strong if self.strong > 0 else float("inf")


class LinearModel(ABC):
    """A mean loss over rows plus ``l2/2 ||x||^2 + l1 ||x||_1``.

    Parameters
    ----------
    features: (rows, d) matrix, anything that ``scipy.sparse.csr_matrix`` takes.
    targets: (rows,).
    l2, l1: non-negative weights of the regularisers.
    unpenalised: so many of the last coordinates (an intercept) carry no regulariser.
    workers: how many shards the rows are dealt to, in order; or the (workers + 1,) row offsets.
    total_rows, total_workers: N and n where this object holds only some of the workers' rows
        (one Horovod rank holds one shard); they default to what is here.

    Raises :class:`ConfigurationError` for settings out of range and for non-finite data.
    """

    curvature: float  # sup of the loss's second derivative
    strong_curvature: float  # inf of it

    def __init__(
        self,
        features: object,
        targets: np.ndarray,
        l2: float = 0.0,
        l1: float = 0.0,
        workers: int | Sequence[int] = 1,
        unpenalised: int = 0,
        total_rows: int | None = None,
        total_workers: int | None = None,
    ) -> None:
        self.features = sp.csr_matrix(features, dtype=np.float64)
        self.features.sort_indices()
        self.targets = np.ascontiguousarray(targets, dtype=np.float64)
        self.rows, self.dimension = self.features.shape
        self.offsets = data.split(self.rows, workers) if isinstance(workers, int) else np.asarray(workers)
        self.workers = len(self.offsets) - 1
        self.total_rows = self.rows if total_rows is None else total_rows
        self.total_workers = self.workers if total_workers is None else total_workers
        self.l1, self.l2 = float(l1), float(l2)
        self.unpenalised = unpenalised
        self.penalised = np.ones(self.dimension)
        self.penalised[self.dimension - unpenalised :] = 0.0
        self._l2: float | np.ndarray = self.l2 * self.penalised if unpenalised else self.l2
        self._check()
        self.row_weight = self.total_workers / self.total_rows
        self._transpose = self._per_worker_transpose()

    # -- the loss, one entry per row
    @abstractmethod
    def losses(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray: ...

    @abstractmethod
    def slopes(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """First derivative of the loss in the margin."""

    @abstractmethod
    def curvatures(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Second derivative of the loss in the margin."""

    def _check(self) -> None:
        if self.targets.shape != (self.rows,):
            raise ConfigurationError(
                f"targets has shape {self.targets.shape}; it needs one entry for each of the {self.rows} rows"
            )
        for name in ("l1", "l2"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise ConfigurationError(f"{name}={value} must be finite and at least 0")
        if not (np.isfinite(self.features.data).all() and np.isfinite(self.targets).all()):
            raise ConfigurationError(
                "features and targets must be finite; remove or impute NaN and infinite entries"
            )

    def _per_worker_transpose(self) -> sp.csr_matrix:
        """(workers * d, rows): row ``tau * d + j`` is column j of the shard of worker tau."""
        coordinates = self.features.tocoo()
        owner = np.searchsorted(self.offsets, coordinates.row, side="right") - 1
        target = owner.astype(np.int64) * self.dimension + coordinates.col
        shape = (self.workers * self.dimension, self.rows)
        transpose = sp.csr_matrix((coordinates.data, (target, coordinates.row)), shape=shape)
        transpose.sort_indices()
        return transpose

    # -- what the algorithms ask
    def loss(self, x: np.ndarray) -> float:
        """The objective P(x) over the rows held here (all of them unless this is one shard)."""
        return float(self.worker_losses(x).sum()) + self.regulariser(x)

    def worker_losses(self, x: np.ndarray) -> np.ndarray:
        """(workers,): each shard's part of the mean loss over all rows, without regulariser."""
        losses = self.losses(self.features @ x, self.targets)
        parts = [losses[a:b].sum() for a, b in zip(self.offsets, self.offsets[1:], strict=False)]
        return np.array(parts) / self.total_rows

    def regulariser(self, x: np.ndarray) -> float:
        inside = x * self.penalised
        return 0.5 * self.l2 * float(np.sum(inside * inside)) + self.l1 * float(np.sum(np.abs(inside)))

    def gradients(self, x: np.ndarray) -> np.ndarray:
        """(workers, d): the gradient of each f^(tau) at x."""
        slopes = self.slopes(self.features @ x, self.targets)
        slopes *= self.row_weight
        out: np.ndarray = (self._transpose @ slopes).reshape(self.workers, self.dimension)
        if self.l2:
            out += self._l2 * x
        return out

    def gradient(self, x: np.ndarray) -> np.ndarray:
        """(d,): the gradient of the smooth part, the mean over the workers held here."""
        return self.gradients(x).sum(axis=0) / self.workers

    def batch_gradients(self, x: np.ndarray, batches: Sequence[np.ndarray]) -> np.ndarray:
        """(workers, d): unbiased estimates of :meth:`gradients` from rows of each shard.

        ``x``: (d,), or (workers, d) for a point per worker.  ``batches[tau]``: row numbers within
        shard tau, repeats allowed.
        """
        sizes = np.array([len(batch) for batch in batches])
        rows = np.concatenate([self.offsets[tau] + batch for tau, batch in enumerate(batches)])
        part = self.features[rows]
        lengths = np.diff(part.indptr)
        row = np.repeat(np.arange(rows.size), lengths)
        owner = np.repeat(np.arange(self.workers), sizes)[row]
        points = x[part.indices] if x.ndim == 1 else x[owner, part.indices]
        margins = np.bincount(row, part.data * points, rows.size)
        weights = np.repeat(self.row_weight * np.diff(self.offsets) / sizes, sizes)
        slopes = self.slopes(margins, self.targets[rows]) * weights
        cell = owner * self.dimension + part.indices
        flat = np.bincount(cell, part.data * slopes[row], self.workers * self.dimension)
        return flat.reshape(self.workers, self.dimension) + self._l2 * x

    def prox(self, v: np.ndarray, step: float) -> np.ndarray:
        """argmin over u of ``l1 ||u||_1 + ||u - v||^2 / (2 step)``: soft thresholding."""
        if not self.l1:
            return v
        return np.sign(v) * np.maximum(np.abs(v) - step * self.l1 * self.penalised, 0.0)

    def shard(self, worker: int) -> LinearModel:
        """The problem as the worker of that number holds it alone."""
        start, stop = self.offsets[worker], self.offsets[worker + 1]
        return type(self)(
            self.features[start:stop], self.targets[start:stop], self.l2, self.l1,
            unpenalised=self.unpenalised, total_rows=self.total_rows, total_workers=self.total_workers,
        )  # fmt: skip

    # -- constants
    def gram_products(self, v: np.ndarray) -> np.ndarray:
        """(workers, d): ``(n/N) A_tau' A_tau v`` of each worker; their mean is ``A'A v / N``."""
        products = self._transpose @ (self.row_weight * (self.features @ v))
        return products.reshape(self.workers, self.dimension)

    def worker_spectra(self) -> np.ndarray:
        """(workers,): the largest eigenvalue of ``(n/N) A_tau' A_tau`` of each worker."""
        found = np.empty(self.workers)
        for tau in range(self.workers):
            part = self.features[self.offsets[tau] : self.offsets[tau + 1]]
            found[tau] = self.row_weight * _largest_gram_eigenvalue(part)
        return found

    def row_spectra(self) -> np.ndarray:
        """(workers,): the largest squared row norm of each shard times ``m_tau n / N``."""
        squares = np.asarray(self.features.multiply(self.features).sum(axis=1)).ravel()
        sizes = np.diff(self.offsets)
        largest = np.array(
            [squares[a:b].max(initial=0.0) for a, b in zip(self.offsets, self.offsets[1:], strict=False)]
        )
        return largest * sizes * self.row_weight

    @cached_property
    def smoothness(self) -> Smoothness:
        """The constants of the rows held here, computed from the spectra (never guessed)."""
        return smoothness(self, lambda rows: rows.sum(axis=0) / self.workers, lambda values: values)

    @cached_property
    def optimum(self) -> tuple[np.ndarray, float]:
        """The minimiser and the least objective, to rounding (Newton; proximal Newton with l1)."""
        x = _minimise(self)
        return x, self.loss(x)


class LogisticRegression(LinearModel):
    """``log(1 + exp(-b a'x))`` with targets b in {-1, +1}; second derivative at most 1/4."""

    curvature = 0.25
    strong_curvature = 0.0

    def _check(self) -> None:
        super()._check()
        if not np.isin(self.targets, (-1.0, 1.0)).all():
            raise ConfigurationError(
                "logistic regression needs targets in {-1, +1}; map the two classes to them"
            )

    def losses(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        signed = targets * margins
        losses = np.exp(-np.abs(signed))  # between 0 and 1
        np.log1p(losses, out=losses)
        losses -= np.minimum(signed, 0.0)
        return losses

    def slopes(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        slopes = targets * margins
        np.minimum(slopes, 700.0, out=slopes)  # exp stays finite
        np.exp(slopes, out=slopes)
        slopes += 1.0
        np.divide(-targets, slopes, out=slopes)
        return slopes

    def curvatures(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return expit(margins) * expit(-margins)


class Ridge(LinearModel):
    """``(a'x - b)^2 / 2``."""

    curvature = 1.0
    strong_curvature = 1.0

    def losses(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return 0.5 * (margins - targets) ** 2

    def slopes(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return margins - targets

    def curvatures(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return np.ones_like(margins)


def smoothness(
    problem: LinearModel,
    mean: Callable[[np.ndarray], np.ndarray],
    gather: Callable[[np.ndarray], np.ndarray],
) -> Smoothness:
    """The constants of a problem whose workers may live in several processes.

    ``mean`` turns (workers here, d) into the mean (d,) over all workers; ``gather`` turns one
    number per worker here into one per worker of the world.  The extreme eigenvalues of
    ``A'A/N`` come from the d x d matrix for small d and from Lanczos otherwise.  Bounds are
    rounded outward to nine digits, so that every process ends with the same numbers.
    """
    d = problem.dimension
    if d <= _GRAM_LIMIT:
        gram = np.stack([mean(problem.gram_products(unit)) for unit in np.eye(d)])
        gram = 0.5 * (gram + gram.T)
        top = float(np.linalg.eigvalsh(gram)[-1])
        hessian = problem.strong_curvature * gram + np.diag(problem.l2 * problem.penalised)
        strong = float(np.linalg.eigvalsh(hessian)[0])
        strong = strong if strong > 1e-12 * top else 0.0
    else:
        operator = spla.LinearOperator(
            (d, d), matvec=lambda v: mean(problem.gram_products(v)), dtype=np.float64
        )
        start = np.ones(d)
        top = float(spla.eigsh(operator, k=1, which="LM", v0=start, return_eigenvectors=False)[0])
        strong = 0.0 if problem.unpenalised else problem.l2  # a safe bound: the regulariser alone
    l2 = problem.l2
    return Smoothness(
        mean=_outward(problem.curvature * top + l2),
        worker=_outward(problem.curvature * float(gather(problem.worker_spectra()).max()) + l2),
        row=_outward(problem.curvature * float(gather(problem.row_spectra()).max()) + l2),
        strong=_outward(strong, up=False),
    )


def _outward(value: float, up: bool = True) -> float:
    factor = 1.0 + 1e-9 if up else 1.0 - 1e-9
    return float(f"{value * factor:.9e}")


def _largest_gram_eigenvalue(part: sp.csr_matrix) -> float:
    rows, d = part.shape
    if part.nnz == 0:
        return 0.0
    if min(rows, d) <= _DENSE_LIMIT:
        gram = (part.T @ part if d <= rows else part @ part.T).toarray()
        n = gram.shape[0]
        return float(scipy.linalg.eigh(gram, eigvals_only=True, subset_by_index=[n - 1, n - 1])[0])
    operator = spla.LinearOperator((d, d), matvec=lambda v: part.T @ (part @ v), dtype=np.float64)
    return float(spla.eigsh(operator, k=1, which="LM", v0=np.ones(d), return_eigenvectors=False)[0])


def _minimise(problem: LinearModel, iterations: int = 200) -> np.ndarray:
    """Newton's method on the coordinates that are free; with l1, signs fixed between steps.

    l1: accelerated proximal gradient finds the signs, Newton on the support then gives the
    last digits; the pair repeats until the optimality conditions hold to rounding.
    """
    if problem.strong_curvature == 0 and problem.l2 == 0 and not problem.unpenalised:
        raise ConfigurationError("l2=0 leaves logistic regression without a unique minimiser; give l2 > 0")
    x = np.zeros(problem.dimension)
    for _ in range(iterations if problem.l1 else 1):
        signs = None
        if problem.l1:
            x = _proximal_gradient(problem, x)
            signs = np.sign(x)
        x = _newton(problem, x, signs)
        if signs is None or _is_optimal(problem, x):
            return x
    return x


def _newton(problem: LinearModel, x: np.ndarray, signs: np.ndarray | None) -> np.ndarray:
    free = np.arange(problem.dimension) if signs is None else np.flatnonzero(signs)
    if free.size == 0:
        return x
    bias = problem.l1 * (signs * problem.penalised)[free] if signs is not None else 0.0
    best, value = x, problem.loss(x)
    for _ in range(100):
        slope = problem.gradient(best)[free] + bias
        if np.abs(slope).max() == 0.0:
            break
        direction = _solve(problem, best, free, slope)
        step = 1.0
        while step > 1e-10:
            trial = best.copy()
            trial[free] -= step * direction
            if problem.loss(trial) < value:
                break
            step /= 2
        else:
            # no further decrease that float64 can see: one last full step polishes the gradient
            trial = best.copy()
            trial[free] -= direction
            better = np.abs(problem.gradient(trial)[free] + bias).max() < np.abs(slope).max()
            return trial if better and problem.loss(trial) <= value + 1e-14 * abs(value) else best
        best, value = trial, problem.loss(trial)
    return best


def _solve(problem: LinearModel, x: np.ndarray, free: np.ndarray, slope: np.ndarray) -> np.ndarray:
    if free.size <= _DENSE_LIMIT:
        part = problem.features if free.size == problem.dimension else problem.features[:, free]
        weights = problem.curvatures(problem.features @ x, problem.targets) / problem.total_rows
        hessian = (part.T @ sp.diags(weights) @ part).toarray()
        hessian[np.diag_indices(free.size)] += problem.l2 * problem.penalised[free]
        return np.asarray(scipy.linalg.lstsq(hessian, slope)[0])
    part = problem.features[:, free]
    weights = problem.curvatures(problem.features @ x, problem.targets) / problem.total_rows
    operator = spla.LinearOperator(
        (free.size, free.size),
        matvec=lambda v: part.T @ (weights * (part @ v)) + problem.l2 * problem.penalised[free] * v,
        dtype=np.float64,
    )
    return np.asarray(spla.cg(operator, slope, rtol=1e-12, maxiter=5000)[0])


def _proximal_gradient(problem: LinearModel, x: np.ndarray, rounds: int = 2000) -> np.ndarray:
    step = 1.0 / problem.smoothness.mean
    y, previous, t = x, x, 1.0
    for _ in range(rounds):
        x = problem.prox(y - step * problem.gradient(y), step)
        if np.sum((y - x) * (x - previous)) > 0:  # momentum points uphill: restart (O'Donoghue & Candes)
            t = 1.0
        following = 0.5 * (1.0 + np.sqrt(1.0 + 4.0 * t * t))
        y = x + (t - 1.0) / following * (x - previous)
        if np.abs(x - previous).max() <= 1e-15 * max(np.abs(x).max(), 1e-300):
            break
        previous, t = x, following
    return x


def _is_optimal(problem: LinearModel, x: np.ndarray) -> bool:
    slope = problem.gradient(x)
    tolerance = 1e-10 * (problem.l1 + np.abs(slope).max())
    active = x != 0
    pull = problem.l1 * problem.penalised
    flat = np.abs(slope) <= pull + tolerance
    level = np.abs(slope + pull * np.sign(x)) <= tolerance
    return bool(np.where(active, level, flat).all())
