"""The TensorFlow member of the backend protocol; the same code runs eagerly and traced.

A length that is known while tracing is a Python int; one that is not is an int64 scalar tensor,
and every function here takes either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..core.backend import Array
from ..core.errors import MessageError

_DTYPES = {
    name: getattr(tf, name)
    for name in ("float16", "bfloat16", "float32", "float64", "uint8", "int16", "int32", "int64", "bool")
}


class TensorFlowBackend:
    name = "tensorflow"

    def constant(self, value: Any, dtype: str, like: Array) -> Array:
        if tf.is_tensor(value):
            return tf.cast(value, _DTYPES[dtype])
        if isinstance(value, list | tuple) and any(map(tf.is_tensor, value)):
            return tf.stack([tf.cast(item, _DTYPES[dtype]) for item in value])
        return tf.constant(value, dtype=_DTYPES[dtype])

    def zeros(self, length: Any, dtype: str, like: Array) -> Array:
        return tf.zeros([length], dtype=_DTYPES[dtype])

    def arange(self, length: Any, like: Array) -> Array:
        return tf.range(tf.cast(length, tf.int64))

    def length(self, x: Array) -> Any:
        known = x.shape.num_elements()
        return tf.size(x, out_type=tf.int64) if known is None else known

    def items(self, x: Array, count: int) -> list[Any]:
        return tf.unstack(x, num=count) if not tf.executing_eagerly() else list(x.numpy().tolist())

    def dtype(self, x: Array) -> str:
        return str(x.dtype.name)

    def cast(self, x: Array, dtype: str) -> Array:
        return tf.cast(x, _DTYPES[dtype])

    def bitcast(self, x: Array, dtype: str) -> Array:
        return tf.bitcast(x, _DTYPES[dtype])

    def reshape(self, x: Array, shape: Sequence[Any]) -> Array:
        return tf.reshape(x, list(shape))

    def concat(self, xs: Sequence[Array]) -> Array:
        return tf.concat(list(xs), axis=0)

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        typed = a if tf.is_tensor(a) else b  # a bare number takes the type of the other side
        return tf.where(condition, tf.convert_to_tensor(a, typed.dtype), tf.convert_to_tensor(b, typed.dtype))

    def abs(self, x: Array) -> Array:
        return tf.abs(x)

    def sqrt(self, x: Array) -> Array:
        return tf.sqrt(x)

    def minimum(self, a: Array, b: Array) -> Array:
        return tf.minimum(a, b)

    def shift_left(self, x: Array, bits: Any) -> Array:
        return tf.bitwise.left_shift(x, tf.cast(bits, x.dtype))

    def shift_right(self, x: Array, bits: Any) -> Array:
        return tf.bitwise.right_shift(x, tf.cast(bits, x.dtype))

    def xor(self, a: Array, b: Any) -> Array:
        return tf.bitwise.bitwise_xor(a, tf.cast(b, a.dtype))

    def sum(self, x: Array) -> Array:
        return tf.reduce_sum(_widened(x))

    def max(self, x: Array) -> Array:
        return tf.reduce_max(x)

    def cumsum(self, x: Array) -> Array:
        return tf.cumsum(_widened(x))

    def sort(self, x: Array) -> Array:
        return tf.sort(x, direction="DESCENDING")

    def argmax(self, x: Array) -> Array:
        return tf.argmax(x, output_type=tf.int64)

    def all_finite(self, x: Array) -> Array:
        return tf.reduce_all(tf.math.is_finite(x)) if x.dtype.is_floating else tf.constant(True)

    def kth_largest(self, x: Array, k: Any) -> Array:
        return tf.raw_ops.NthElement(input=x, n=tf.cast(k, tf.int32) - 1, reverse=True)

    def nonzero(self, mask: Array) -> Array:
        return tf.reshape(tf.where(mask), [-1])

    def take(self, x: Array, indices: Array) -> Array:
        return tf.gather(x, indices)

    def put(self, x: Array, indices: Array, values: Array) -> Array:
        return tf.tensor_scatter_nd_update(x, indices[:, tf.newaxis], values)

    def copy(self, x: Array) -> Array:
        return tf.identity(x)

    def scatter_add_(self, x: Array, indices: Array, values: Array) -> Array:
        return tf.tensor_scatter_nd_add(x, indices[:, tf.newaxis], values)

    def add_(self, x: Array, y: Array) -> Array:
        return x + y

    def put_(self, x: Array, indices: Array, values: Array) -> Array:
        return self.put(x, indices, values)

    def clear_(self, x: Array) -> Array:
        return tf.zeros_like(x)

    def matmul(self, x: Array, y: Array) -> Array:
        return tf.matmul(x, y)

    def transpose(self, x: Array) -> Array:
        return tf.transpose(x)

    def orthonormal(self, x: Array) -> Array:
        return tf.transpose(tf.linalg.qr(tf.transpose(x)).q)

    def product(self, x: Array, y: Array, room: Array | None) -> Array:
        return tf.reshape(tf.matmul(x, y, transpose_a=True), [-1])

    def subtract_product_(self, z: Array, x: Array, y: Array) -> Array:
        return z - self.product(x, y, None)

    def cond(self, predicate: Array, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        known = tf.get_static_value(predicate)
        if known is not None:  # eager, or decided while tracing
            return if_true() if known else if_false()
        return tf.cond(predicate, if_true, if_false)

    def check(self, condition: Any, message: str, x: Array) -> Array:
        if not tf.is_tensor(condition) or tf.executing_eagerly():
            if not bool(condition):
                raise MessageError(message)
            return x
        with tf.control_dependencies([tf.debugging.Assert(condition, [message])]):
            return tf.identity(x)

    def host(self, x: Array) -> np.ndarray[Any, Any] | None:
        return None

    def from_host(self, array: np.ndarray[Any, Any], like: Array) -> Array:
        return tf.constant(array)


def _widened(x: Array) -> Array:
    """Integers and booleans are accumulated in int64, as NumPy and torch do."""
    return x if x.dtype.is_floating else tf.cast(x, tf.int64)


TENSORFLOW = TensorFlowBackend()
