"""The NumPy member of the backend protocol: the reference for the other two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import kernels, scan
from .backend import Array
from .errors import MessageError

_DTYPES = {
    "float16": np.float16, "float32": np.float32, "float64": np.float64, "uint8": np.uint8,
    "int16": np.int16, "int32": np.int32, "int64": np.int64, "bool": np.bool_,
}  # fmt: skip


def _quiet() -> np.errstate:
    """What is not finite is looked for, and told of, by the core."""
    return np.errstate(over="ignore", invalid="ignore")


class NumpyBackend:
    name = "numpy"

    def constant(self, value: Any, dtype: str, like: Array) -> Array:
        return np.asarray(value, dtype=_DTYPES[dtype])

    def zeros(self, length: Any, dtype: str, like: Array) -> Array:
        return np.zeros(int(length), dtype=_DTYPES[dtype])

    def arange(self, length: Any, like: Array) -> Array:
        return np.arange(int(length), dtype=np.int64)

    def length(self, x: Array) -> int:
        return int(np.size(x))

    def items(self, x: Array, count: int) -> list[Any]:
        return list(x.tolist())

    def dtype(self, x: Array) -> str:
        return str(x.dtype)

    def cast(self, x: Array, dtype: str) -> Array:
        return np.asarray(x).astype(_DTYPES[dtype], copy=False)

    def bitcast(self, x: Array, dtype: str) -> Array:
        return np.asarray(x).view(_DTYPES[dtype])

    def reshape(self, x: Array, shape: Sequence[Any]) -> Array:
        return np.reshape(x, tuple(int(n) for n in shape))

    def concat(self, xs: Sequence[Array]) -> Array:
        return np.concatenate(xs)

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        return np.where(condition, a, b)

    def abs(self, x: Array) -> Array:
        return np.abs(x)

    def sqrt(self, x: Array) -> Array:
        return np.sqrt(x)

    def minimum(self, a: Array, b: Array) -> Array:
        return np.minimum(a, b)

    def shift_left(self, x: Array, bits: Any) -> Array:
        return np.left_shift(x, bits)

    def shift_right(self, x: Array, bits: Any) -> Array:
        return np.right_shift(x, bits)

    def xor(self, a: Array, b: Any) -> Array:
        return np.bitwise_xor(a, b)

    def sum(self, x: Array) -> Array:
        return np.sum(x)

    def max(self, x: Array) -> Array:
        return np.max(x)

    def cumsum(self, x: Array) -> Array:
        return np.cumsum(x)

    def sort(self, x: Array) -> Array:
        return np.sort(x)[::-1]

    def argmax(self, x: Array) -> Array:
        return np.argmax(x)

    def all_finite(self, x: Array) -> Array:
        return np.isfinite(x).all()

    def kth_largest(self, x: Array, k: Any) -> Array:
        position = x.size - int(k)
        return np.partition(x, position)[position]

    def nonzero(self, mask: Array) -> Array:
        return np.flatnonzero(mask)

    def take(self, x: Array, indices: Array) -> Array:
        return np.take(x, indices)

    def put(self, x: Array, indices: Array, values: Array) -> Array:
        out = np.array(x)
        out[indices] = values
        return out

    def copy(self, x: Array) -> Array:
        return np.array(x)

    def scatter_add_(self, x: Array, indices: Array, values: Array) -> Array:
        np.add.at(x, indices, values)
        return x

    def add_(self, x: Array, y: Array) -> Array:
        return np.add(x, y, out=x)

    def put_(self, x: Array, indices: Array, values: Array) -> Array:
        x[indices] = values
        return x

    def clear_(self, x: Array) -> Array:
        if kernels.AVAILABLE and x.dtype == np.float32 and x.flags.c_contiguous:
            scan.clear(x.reshape(-1))
        else:
            x[...] = 0
        return x

    def matmul(self, x: Array, y: Array) -> Array:
        with _quiet():
            return x @ y

    def transpose(self, x: Array) -> Array:
        return x.T

    def orthonormal(self, x: Array) -> Array:
        return np.ascontiguousarray(np.linalg.qr(x.T)[0].T)

    def product(self, x: Array, y: Array, room: Array | None) -> Array:
        out = None if room is None else room.reshape(x.shape[1], y.shape[1])
        with _quiet():
            return np.matmul(x.T, y, out=out).reshape(-1)

    def subtract_product_(self, z: Array, x: Array, y: Array) -> Array:
        whole = z.reshape(x.shape[1], y.shape[1])
        step = max(1, scan.CACHED // y.shape[1])
        for begin in range(0, len(whole), step):  # so that the product stays in the cache
            part = whole[begin : begin + step]
            np.subtract(part, x[:, begin : begin + step].T @ y, out=part)
        return z

    def cond(self, predicate: Array, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        return if_true() if bool(predicate) else if_false()

    def check(self, condition: Any, message: str, x: Array) -> Array:
        if not bool(condition):
            raise MessageError(message)
        return x

    def host(self, x: Array) -> np.ndarray[Any, Any] | None:
        return np.ascontiguousarray(x)

    def from_host(self, array: np.ndarray[Any, Any], like: Array) -> Array:
        return array


NUMPY = NumpyBackend()
