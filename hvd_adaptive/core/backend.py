"""The primitive operations that the core asks of an array library.

The logic of the core is written once, on top of these.  A backend is one small class per
library; ``backend_of(array)`` finds it by the array's module, without importing a library
that the caller has not imported already.

Conventions
-----------
* dtypes are named by strings: ``float16 bfloat16 float32 float64 uint8 int32 int64 bool``.
* arrays are one-dimensional unless stated otherwise (matrices are row-major); functions return new
  arrays and never write to their arguments, but for those whose name ends in ``_`` (as in torch).
* ``like=`` names an array whose device (and graph) a new array shares.
* integer arithmetic is two's complement and wraps; ``+ - * & |`` and comparisons are the
  arrays' own operators, as is slicing with ``[a:b]``.
* a value that Python must know (a length that decides a loop) is never asked for here:
  TensorFlow traces this code, so data-dependent control flow goes through :meth:`cond`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from .errors import ConfigurationError

Array = Any


class Backend(Protocol):
    """What the core needs from an array library."""

    name: str

    # -- making arrays
    def constant(self, value: Any, dtype: str, like: Array) -> Array:
        """A scalar or (nested) list as an array; the items of a flat list may be 0-d arrays."""

    def zeros(self, length: Any, dtype: str, like: Array) -> Array: ...

    def arange(self, length: Any, like: Array) -> Array:
        """int64 ``0 .. length - 1``."""

    # -- shape and type
    def length(self, x: Array) -> Any:
        """Number of elements: a Python int, or a TensorFlow int64 scalar."""

    def items(self, x: Array, count: int) -> list[Any]:
        """The ``count`` elements of ``x``: Python numbers, or scalars of a graph while it is traced.

        The one place where a device is waited for: ask for several at once.
        """

    def dtype(self, x: Array) -> str: ...

    def cast(self, x: Array, dtype: str) -> Array: ...

    def bitcast(self, x: Array, dtype: str) -> Array:
        """The same bits under a dtype of the same width (int32/float32, int64/float64)
        or from ``float16``/``bfloat16`` to ``int16`` and back."""

    def reshape(self, x: Array, shape: Sequence[Any]) -> Array: ...

    def concat(self, xs: Sequence[Array]) -> Array: ...

    # -- element-wise
    def where(self, condition: Array, a: Any, b: Any) -> Array: ...

    def abs(self, x: Array) -> Array: ...

    def sqrt(self, x: Array) -> Array: ...

    def minimum(self, a: Array, b: Array) -> Array: ...

    def shift_left(self, x: Array, bits: Any) -> Array: ...

    def shift_right(self, x: Array, bits: Any) -> Array:
        """Arithmetic shift (the sign is kept)."""

    def xor(self, a: Array, b: Any) -> Array: ...

    # -- reductions and orders
    def sum(self, x: Array) -> Array: ...

    def max(self, x: Array) -> Array: ...

    def cumsum(self, x: Array) -> Array: ...

    def sort(self, x: Array) -> Array:
        """Descending."""

    def argmax(self, x: Array) -> Array:
        """The first position of the maximum, int64 scalar."""

    def all_finite(self, x: Array) -> Array:
        """Boolean scalar."""

    def kth_largest(self, x: Array, k: Any) -> Array:
        """The k-th largest element, 1 <= k <= length (scalar)."""

    # -- indexing
    def nonzero(self, mask: Array) -> Array:
        """int64 positions where ``mask`` is true, ascending."""

    def take(self, x: Array, indices: Array) -> Array: ...

    def put(self, x: Array, indices: Array, values: Array) -> Array:
        """A copy of ``x`` with ``x[indices] = values`` (distinct indices)."""

    def copy(self, x: Array) -> Array:
        """``x`` in storage of its own."""

    # -- memory that is used again
    def scatter_add_(self, x: Array, indices: Array, values: Array) -> Array:
        """``x`` with ``values`` added at ``indices``, repeated ones accumulated; may reuse ``x``."""

    def add_(self, x: Array, y: Array) -> Array:
        """``x + y``; may reuse the storage of ``x``, which the caller must not use again."""

    def put_(self, x: Array, indices: Array, values: Array) -> Array:
        """As :meth:`put`; may reuse the storage of ``x``."""

    def clear_(self, x: Array) -> Array:
        """Zeros in the place of ``x``."""

    # -- matrices, float32
    def matmul(self, x: Array, y: Array) -> Array: ...

    def transpose(self, x: Array) -> Array: ...

    def orthonormal(self, x: Array) -> Array:
        """Orthonormal rows, of which the first k span the first k rows of ``x`` (k x n, k <= n)."""

    def product(self, x: Array, y: Array, room: Array | None) -> Array:
        """x^T y of ``x`` (k x n) and ``y`` (k x m), flat; may lie in the storage of ``room``."""

    def subtract_product_(self, z: Array, x: Array, y: Array) -> Array:
        """The flat ``z`` less x^T y; may reuse its storage."""

    # -- control
    def cond(self, predicate: Array, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        """Both branches return arrays of the same structure, dtype and rank."""

    def check(self, condition: Any, message: str, x: Array) -> Array:
        """``x``, if ``condition`` (a bool or a boolean scalar) holds; else a MessageError.

        In a graph the failure is an InvalidArgumentError with the same message, and nothing that
        is computed from the returned array runs before the condition is known to hold.
        """

    # -- the host's memory, for compiled kernels
    def host(self, x: Array) -> np.ndarray[Any, Any] | None:
        """``x`` as a NumPy array on the same memory, or None where there is none (GPU, graph)."""

    def from_host(self, array: np.ndarray[Any, Any], like: Array) -> Array:
        """The reverse: an array of this library on the memory of ``array``."""


_members: dict[str, Backend] = {}


def register(root_module: str, backend: Backend) -> None:
    """Make ``backend`` serve the arrays whose type lives under ``root_module``."""
    _members[root_module] = backend


def backend_of(x: Array) -> Backend:
    """The backend that serves ``x``; loads the member for torch or TensorFlow on first use."""
    root = type(x).__module__.partition(".")[0]
    found = _members.get(root)
    if found is not None:
        return found
    if root in ("numpy", "builtins"):
        from .numpy_backend import NUMPY

        register("numpy", NUMPY)
        register("builtins", NUMPY)
        return NUMPY
    if root == "torch" or (root not in ("tensorflow", "keras") and _is_torch(x)):
        from ..torch.backend import TORCH

        register(root, TORCH)
        return TORCH
    if root == "tensorflow":
        from ..tensorflow.backend import TENSORFLOW

        register(root, TENSORFLOW)
        return TENSORFLOW
    raise ConfigurationError(
        f"arrays of type {type(x).__module__}.{type(x).__qualname__} are not supported; "
        "pass a NumPy array, a torch.Tensor or a tf.Tensor"
    )


def _is_torch(x: Array) -> bool:
    torch = sys.modules.get("torch")  # subclasses, such as torch.nn.Parameter of a user's library
    return torch is not None and isinstance(x, torch.Tensor)
