"""Low rank: what a matrix is along a few directions that all ranks hold alike.

The gradient of a layer, averaged over a batch, lies near few directions.  In each step a rank sends its
matrix A (rows x columns), residual included, projected onto r orthonormal directions: by turns of the
columns' space, values = V A^T, and of the rows', values = U A.  The projection is linear, so
values of all ranks add up on Horovod's own allreduce, as many however many ranks there are, with no
index; what comes back spans the directions of the next step of the other kind.  So every two steps
make one step of orthogonal iteration on the matrix that is being sent: PowerSGD (Vogels et al. 2019) with
one half of its exchange in each step, which leaves one collective a step (so does ACP-SGD, Zhang et al.
2023).  What is not sent stays in the residual.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from . import hashing, kernels, scan, selection
from .backend import Array, Backend
from .errors import ConfigurationError
from .numpy_backend import NUMPY

Host = np.ndarray[Any, Any]

LARGEST_SHARE = 0.25
"""A projection of more than this part of a matrix's elements would save too little for what it loses."""


class Matrix(NamedTuple):
    """A tensor's elements, in their order, as ``rows`` times ``columns``."""

    rows: int
    columns: int

    @property
    def per_rank(self) -> float:
        """Values that are sent for each direction, in the mean of two steps."""
        return (self.rows + self.columns) / 2


def matrix(shape: Sequence[int]) -> Matrix | None:
    """The most nearly square matrix that a tensor of that shape is without moving an element, or None.

    Of a convolution that joins the input channels to the kernel, whichever framework laid it out.
    """
    splits = [Matrix(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    best = min(splits, key=lambda m: m.per_rank, default=None)
    return best if best is not None and min(best) > 1 else None


@dataclass(frozen=True)
class LowRank:
    """``rank`` directions of every matrix, which all ranks share.

    ``matrix``: the tensor's, once it is known; see :meth:`fitted`.
    """

    rank: int = 4
    matrix: Matrix = Matrix(0, 0)

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ConfigurationError(f"rank must be a whole number of at least 1, not {self.rank!r}")

    def fitted(self, shape: Sequence[int]) -> LowRank | None:
        """For a tensor of that shape, with no more directions than save something; None without any."""
        found = matrix(shape)
        if found is None:
            return None
        rank = min(self.rank, int(LARGEST_SHARE * math.prod(found) / found.per_rank), min(found))
        return dataclasses.replace(self, rank=rank, matrix=found) if rank else None

    @property
    def length(self) -> int:
        """Elements of the directions of both kinds, as :meth:`start` has them."""
        return self.rank * sum(self.matrix)

    def support(self, b: Backend, x: Array, control: Any) -> Array:
        """int64 indices, ascending, of the coordinates of ``x`` that a first step sends: as many as make
        a message of about the same size."""
        dimension = int(x.shape[0])
        count = max(1, min(dimension, int(self.rank * self.matrix.per_rank)))
        threshold = selection.near_threshold(b, selection.sample(b, x), dimension, count)
        return selection.some(b, x, selection.at_least(b, x, threshold))

    def start(self) -> np.ndarray[Any, Any]:
        """The directions before any was learnt: float32, flat, U (rank x rows) before V (rank x columns)."""
        return _start(self.rank, self.matrix)

    def project(self, b: Backend, x: Array, control: Any, used: Any) -> Array:
        """What is sent of ``x`` (float32, d elements): flat, ``used`` times rows or columns."""
        a = b.reshape(x, self.matrix)
        return b.cond(
            _even(control),
            lambda: b.reshape(b.matmul(self._right(b, x, control)[:used], b.transpose(a)), (-1,)),
            lambda: b.reshape(b.matmul(self._left(b, x, control)[:used], a), (-1,)),
        )

    def swept(
        self, b: Backend, total: Host, own: Host, control: Any, used: Any, like: Array
    ) -> tuple[Array, bool]:
        """Adds what is finite of ``own`` to ``total``, in the host's memory, and returns what :meth:`project`
        says of the sum; and whether all of ``own`` is finite.  ``like``: an array of the backend."""
        right = bool(_even(control))
        directions = (self._right if right else self._left)(b, like, control)[:used]
        known, shape = kernels.host(b, directions), self.matrix
        assert known is not None

        def multiply(x: Host, y: Host) -> Any:
            return kernels.host(b, b.matmul(b.from_host(x, like), b.from_host(y, like)))

        values, finite = scan.add_and_project(
            total.reshape(shape), own.reshape(shape), known, right, multiply
        )
        return b.from_host(values.reshape(-1), like), finite

    def less(self, b: Backend, x: Array, control: Any, values: Array, used: Any) -> Array:
        """``x`` without what the ``values`` say; may reuse its storage."""
        return b.cond(
            _even(control),
            lambda: b.subtract_product_(x, self._rows(b, values), self._right(b, x, control)[:used]),
            lambda: b.subtract_product_(x, self._left(b, x, control)[:used], self._columns(b, values)),
        )

    def spread(self, b: Backend, control: Any, values: Array, used: Any, room: Array | None = None) -> Array:
        """What the ``values`` say of the tensor: float32, d elements, in the storage of ``room``."""
        return b.cond(
            _even(control),
            lambda: b.product(self._rows(b, values), self._right(b, values, control)[:used], room),
            lambda: b.product(self._left(b, values, control)[:used], self._columns(b, values), room),
        )

    def following(self, b: Backend, control: Any, values: Array, used: Any) -> Array:
        """The directions that the sum of all ranks' ``values`` leaves for the next step."""
        ends = self._ends
        now = self._directions(b, values, control)

        def turned(values: Array, before: Array) -> Array:
            return b.reshape(b.orthonormal(b.concat([values, before[used:]])), (-1,))

        return b.cond(
            _even(control),
            lambda: b.concat([turned(self._rows(b, values), self._left(b, now, control)), now[ends:]]),
            lambda: b.concat([now[:ends], turned(self._columns(b, values), self._right(b, now, control))]),
        )

    @property
    def _ends(self) -> int:
        """Where the directions of the rows' space end, and those of the columns' begin."""
        return self.rank * self.matrix.rows

    def _directions(self, b: Backend, like: Array, control: Any) -> Array:
        return b.constant(self.start(), "float32", like) if control.directions is None else control.directions

    def _left(self, b: Backend, like: Array, control: Any) -> Array:
        return self._rows(b, self._directions(b, like, control)[: self._ends])

    def _right(self, b: Backend, like: Array, control: Any) -> Array:
        return self._columns(b, self._directions(b, like, control)[self._ends :])

    def _rows(self, b: Backend, values: Array) -> Array:
        return b.reshape(values, (-1, self.matrix.rows))

    def _columns(self, b: Backend, values: Array) -> Array:
        return b.reshape(values, (-1, self.matrix.columns))


def _even(control: Any) -> Any:
    """Of the steps in which this tensor was sent along directions: others need not bring it each time."""
    return control.trial.steps % 2 == 0


@lru_cache(maxsize=8)
def _start(rank: int, matrix: Matrix) -> np.ndarray[Any, Any]:
    like = np.zeros(1, np.float32)
    halves = [
        NUMPY.orthonormal(hashing.uniform(NUMPY, like, side, 0, rank * length).reshape(rank, length) - 0.5)
        for side, length in enumerate(matrix)
    ]
    return np.concatenate([half.reshape(-1) for half in halves])
