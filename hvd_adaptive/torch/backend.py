"""The torch member of the backend protocol; device-agnostic, never tracked by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..core.backend import Array
from ..core.errors import MessageError
from ..core.numpy_backend import NUMPY

_DTYPES = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "uint8", "int16", "int32", "int64", "bool")
}


class TorchBackend:
    name = "torch"

    def constant(self, value: Any, dtype: str, like: Array) -> Array:
        if isinstance(value, list) and any(isinstance(item, torch.Tensor) for item in value):
            return torch.stack([self.constant(item, dtype, like) for item in value])  # no wait for a GPU
        return torch.as_tensor(value, dtype=_DTYPES[dtype], device=like.device)

    def zeros(self, length: Any, dtype: str, like: Array) -> Array:
        return torch.zeros(int(length), dtype=_DTYPES[dtype], device=like.device)

    def arange(self, length: Any, like: Array) -> Array:
        return torch.arange(int(length), device=like.device)

    def length(self, x: Array) -> int:
        return int(x.numel())

    def items(self, x: Array, count: int) -> list[Any]:
        return list(x.tolist())

    def dtype(self, x: Array) -> str:
        return str(x.dtype).removeprefix("torch.")

    def cast(self, x: Array, dtype: str) -> Array:
        return x.to(_DTYPES[dtype])

    def bitcast(self, x: Array, dtype: str) -> Array:
        return x.view(_DTYPES[dtype])

    def reshape(self, x: Array, shape: Sequence[Any]) -> Array:
        return x.reshape(tuple(int(n) for n in shape))

    def concat(self, xs: Sequence[Array]) -> Array:
        return torch.cat(list(xs))

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        return torch.where(condition, a, b)

    def abs(self, x: Array) -> Array:
        return x.abs()

    def sqrt(self, x: Array) -> Array:
        return x.sqrt()

    def minimum(self, a: Array, b: Array) -> Array:
        return torch.minimum(a, b)

    def shift_left(self, x: Array, bits: Any) -> Array:
        return torch.bitwise_left_shift(x, bits)

    def shift_right(self, x: Array, bits: Any) -> Array:
        return torch.bitwise_right_shift(x, bits)

    def xor(self, a: Array, b: Any) -> Array:
        return torch.bitwise_xor(a, b)

    def sum(self, x: Array) -> Array:
        return x.sum()

    def max(self, x: Array) -> Array:
        return x.max()

    def cumsum(self, x: Array) -> Array:
        return torch.cumsum(x, 0)

    def sort(self, x: Array) -> Array:
        return torch.sort(x, descending=True).values

    def argmax(self, x: Array) -> Array:
        return torch.argmax(x)

    def all_finite(self, x: Array) -> Array:
        return torch.isfinite(x).all()

    def kth_largest(self, x: Array, k: Any) -> Array:
        return torch.topk(x, int(k), sorted=False).values.min()

    def nonzero(self, mask: Array) -> Array:
        return torch.nonzero(mask).reshape(-1)

    def take(self, x: Array, indices: Array) -> Array:
        flat = indices.reshape(-1)
        return x.index_select(0, flat) if indices.dim() else x[indices]

    def put(self, x: Array, indices: Array, values: Array) -> Array:
        return x.index_put((indices,), values)

    def copy(self, x: Array) -> Array:
        return x.clone()

    def scatter_add_(self, x: Array, indices: Array, values: Array) -> Array:
        return x.index_add_(0, indices, values)

    def add_(self, x: Array, y: Array) -> Array:
        return x.add_(y)

    def put_(self, x: Array, indices: Array, values: Array) -> Array:
        return x.index_put_((indices,), values)

    def clear_(self, x: Array) -> Array:
        if x.device.type != "cpu" or x.dtype is not torch.float32:
            return x.zero_()
        NUMPY.clear_(x.detach().numpy())
        return x

    def matmul(self, x: Array, y: Array) -> Array:
        return x @ y

    def transpose(self, x: Array) -> Array:
        return x.T

    def orthonormal(self, x: Array) -> Array:
        return torch.linalg.qr(x.T).Q.T.contiguous()

    def product(self, x: Array, y: Array, room: Array | None) -> Array:
        out = None if room is None else room.view(x.shape[1], y.shape[1])
        return torch.matmul(x.T, y, out=out).view(-1)

    def subtract_product_(self, z: Array, x: Array, y: Array) -> Array:
        z.view(x.shape[1], y.shape[1]).addmm_(x.T, y, alpha=-1)
        return z

    def cond(self, predicate: Array, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        return if_true() if bool(predicate) else if_false()

    def check(self, condition: Any, message: str, x: Array) -> Array:
        if not bool(condition):
            raise MessageError(message)
        return x

    def host(self, x: Array) -> np.ndarray[Any, Any] | None:
        if x.device.type != "cpu" or x.dtype is torch.bfloat16:  # a type that NumPy lacks
            return None
        return x.detach().contiguous().numpy()

    def from_host(self, array: np.ndarray[Any, Any], like: Array) -> Array:
        return torch.from_numpy(array)


TORCH = TorchBackend()
