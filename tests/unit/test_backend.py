"""Every primitive of the backend protocol, on every member, against NumPy.

TensorFlow runs each case twice: eagerly, and traced with all lengths unknown.
"""

from fractions import Fraction

import numpy as np
import pytest

from hvd_adaptive.core.backend import Backend, backend_of
from hvd_adaptive.core.errors import ConfigurationError, MessageError
from hvd_adaptive.core.numpy_backend import NUMPY

PRIMITIVES = sorted(name for name, member in vars(Backend).items() if callable(member) and name[0] != "_")
MEMBERS = ["numpy", "torch", "torch-on-host", "tensorflow", "tensorflow-traced"]


class Runner:
    """Calls ``function(backend, *arrays)`` on one member and gives NumPy arrays back."""

    def __init__(self, member):
        self.member = member

    def __call__(self, function, *arrays):
        if self.member == "numpy":
            with np.errstate(over="ignore"):
                return np.asarray(function(NUMPY, *arrays))
        if self.member == "torch-on-host":
            pytest.importorskip("torch")
            from hvd_adaptive.torch.host import HOST

            with np.errstate(over="ignore"):
                return np.asarray(function(HOST, *map(np.array, arrays)))
        if self.member == "torch":
            torch = pytest.importorskip("torch")
            from hvd_adaptive.torch.backend import TORCH

            result = function(TORCH, *(torch.from_numpy(np.array(a)) for a in arrays))
            return result.numpy() if isinstance(result, torch.Tensor) else np.asarray(result)
        tf = pytest.importorskip("tensorflow")
        from hvd_adaptive.tensorflow.backend import TENSORFLOW

        inputs = [tf.constant(a) for a in arrays]
        if self.member == "tensorflow":
            return np.asarray(function(TENSORFLOW, *inputs))
        unknown = [tf.TensorSpec([None] * x.shape.rank, x.dtype) for x in inputs]
        traced = tf.function(lambda *xs: tf.convert_to_tensor(function(TENSORFLOW, *xs)))
        return traced.get_concrete_function(*unknown)(*inputs).numpy()


@pytest.fixture(params=MEMBERS)
def on(request):
    return Runner(request.param)


def fresh(b, x):
    """A copy that a primitive may write to."""
    return b.concat([x, x])[: b.length(x)]


def f32(*values):
    return np.array(values, dtype=np.float32)


def i64(*values):
    return np.array(values, dtype=np.int64)


I32 = np.array([7, -8, 2**31 - 1, -(2**31)], dtype=np.int32)
BIG = 2**63 - 1
THIRD, THIRD_AS_HALF = f32(1 / 3, 7e4, 1e-9), np.array([1 / 3, np.inf, 0], np.float16)
HALVES, HALF_BITS = np.array([-1.5, 6e-8], np.float16), np.array([-16896, 1], np.int16)

LEFT, RIGHT = f32(1, 2, 3, 4, 5, 6).reshape(2, 3), f32(1, -1, 2, 0).reshape(2, 2)
PRODUCT = (LEFT.T @ RIGHT).reshape(-1)

# primitive -> cases: (the call, its arrays, what NumPy says in so many words)
CASES = {
    "constant": [
        (lambda b, x: b.constant(2.5, "float32", x), [f32(1)], np.float32(2.5)),
        (lambda b, x: b.constant([1, -2, BIG], "int64", x), [f32(1)], i64(1, -2, BIG)),
        (lambda b, x: b.constant(x, "float64", x), [f32(1, 2)], np.array([1.0, 2.0])),
    ],
    "zeros": [
        (lambda b, x: b.zeros(b.length(x), "int32", x), [f32(4, 5, 6)], np.zeros(3, np.int32)),
        (lambda b, x: b.zeros(b.length(x), "float16", x), [f32()], np.zeros(0, np.float16)),
        (lambda b, x: b.zeros(4, "bool", x), [f32(1)], np.zeros(4, bool)),
    ],
    "arange": [
        (lambda b, x: b.arange(b.length(x), x), [f32(4, 5, 6)], i64(0, 1, 2)),
        (lambda b, x: b.arange(0, x), [f32(1)], i64()),
    ],
    "length": [
        (lambda b, x: b.length(x), [f32(4, 5, 6)], i64(3)[0]),
        (lambda b, x: b.length(x), [np.zeros((3, 4), np.float32)], i64(12)[0]),
        (lambda b, x: b.length(x), [f32()], i64(0)[0]),
    ],
    "dtype": [
        (lambda b, x: b.constant(b.dtype(x) == "float16", "bool", x), [np.zeros(1, np.float16)], np.True_),
        (lambda b, x: b.constant(b.dtype(x) == "int64", "bool", x), [i64(1)], np.True_),
        (lambda b, x: b.constant(b.dtype(x > 0) == "bool", "bool", x), [i64(1)], np.True_),
    ],
    "cast": [
        (lambda b, x: b.cast(x, "int32"), [f32(1.9, -1.9, 0)], np.array([1, -1, 0], np.int32)),
        (lambda b, x: b.cast(x, "float16"), [THIRD], THIRD_AS_HALF),
        (lambda b, x: b.cast(x, "bool"), [i64(0, 5, -1)], np.array([False, True, True])),
        (lambda b, x: b.cast(x > 1, "int64"), [f32(0, 2)], i64(0, 1)),
    ],
    "bitcast": [
        (lambda b, x: b.bitcast(x, "int32"), [f32(1, -0.0, np.inf)], f32(1, -0.0, np.inf).view(np.int32)),
        (lambda b, x: b.bitcast(x, "float32"), [I32], I32.view(np.float32)),
        (lambda b, x: b.bitcast(x, "float64"), [i64(1, -1, BIG)], i64(1, -1, BIG).view(np.float64)),
        (lambda b, x: b.bitcast(x, "int16"), [HALVES], HALF_BITS),
        (lambda b, x: b.bitcast(x, "float16"), [HALF_BITS], HALVES),
        (lambda b, x: b.bitcast(x, "int32"), [f32()], np.zeros(0, np.int32)),
    ],
    "reshape": [
        (lambda b, x: b.reshape(x, (b.length(x),)), [np.ones((2, 3), np.float32)], np.ones(6, np.float32)),
        (lambda b, x: b.reshape(x, (-1, 2)), [i64(1, 2, 3, 4)], i64(1, 2, 3, 4).reshape(2, 2)),
        (lambda b, x: b.reshape(x, (-1,)), [np.ones((0, 3), np.float32)], np.ones(0, np.float32)),
    ],
    "concat": [
        (lambda b, x, y: b.concat([x, y, x]), [i64(1, 2), i64(3)], i64(1, 2, 3, 1, 2)),
        (lambda b, x, y: b.concat([x, y]), [i64(), i64(3)], i64(3)),
    ],
    "where": [
        (lambda b, x: b.where(x > 1, x, -x), [f32(1, 2, -3)], f32(-1, 2, 3)),
        (lambda b, x: b.where(x > 1, x, 0), [f32(1, 2)], f32(0, 2)),
        (lambda b, x: b.where(x > 1, 0.5, x), [f32(1, 2)], f32(1, 0.5)),
        (lambda b, x: b.where(x > 1, b.constant(7, "int64", x), x), [i64(1, 2)], i64(1, 7)),
    ],
    "abs": [
        (lambda b, x: b.abs(x), [f32(-1, 2, -0.0)], f32(1, 2, 0)),
        (lambda b, x: b.abs(x), [i64(-3)], i64(3)),
    ],
    "sqrt": [
        (lambda b, x: b.sqrt(x), [f32(4, 0, 2)], np.sqrt(f32(4, 0, 2))),
    ],
    "matmul": [
        (lambda b, x, y: b.matmul(y, x), [LEFT, RIGHT], RIGHT @ LEFT),
    ],
    "transpose": [
        (lambda b, x: b.transpose(x), [LEFT], LEFT.T),
    ],
    "orthonormal": [
        (
            lambda b, x: b.abs(b.orthonormal(x)),
            [f32(0, 3, 0, 2, 5, 0).reshape(2, 3)],
            np.eye(3, dtype=np.float32)[[1, 0]],
        ),
        (
            lambda b, x: b.abs(b.orthonormal(x)),
            [np.zeros((2, 3), np.float32)],
            np.eye(3, dtype=np.float32)[:2],
        ),
    ],
    "product": [
        (lambda b, x, y: b.product(x, y, None), [LEFT, RIGHT], PRODUCT),
        (lambda b, x, y: b.product(x, y, b.zeros(6, "float32", x)), [LEFT, RIGHT], PRODUCT),
    ],
    "subtract_product_": [
        (lambda b, z, x, y: b.subtract_product_(fresh(b, z), x, y), [PRODUCT, LEFT, RIGHT], PRODUCT * 0),
    ],
    "minimum": [
        (lambda b, x, y: b.minimum(x, y), [f32(1, 5), f32(2, 3)], f32(1, 3)),
        (lambda b, x: b.minimum(x, b.constant(2, "int64", x)), [i64(1, 5)], i64(1, 2)),
    ],
    "shift_left": [
        (lambda b, x: b.shift_left(x, 3), [i64(1, -1, 5)], i64(8, -8, 40)),
        (lambda b, x, n: b.shift_left(x, n), [i64(1, 1, 1), i64(0, 62, 63)], i64(1, 2**62, -(2**63))),
        (lambda b, x: b.shift_left(x, 1), [I32], np.array([14, -16, -2, 0], np.int32)),
    ],
    "shift_right": [
        (lambda b, x: b.shift_right(x, 1), [i64(-1, -8, 7)], i64(-1, -4, 3)),
        (lambda b, x, n: b.shift_right(x, n), [i64(-(2**63), BIG), i64(63, 62)], i64(-1, 1)),
        (lambda b, x: b.shift_right(x, 31), [I32], np.array([0, -1, 0, -1], np.int32)),
    ],
    "xor": [
        (lambda b, x: b.xor(x, 1), [i64(0, 1, -1)], i64(1, 0, -2)),
        (lambda b, x, y: b.xor(x, y), [I32, I32], np.zeros(4, np.int32)),
    ],
    "sum": [
        (lambda b, x: b.sum(x), [f32(1, 2, 3.5)], np.float32(6.5)),
        (lambda b, x: b.sum(x), [f32()], np.float32(0)),
        (lambda b, x: b.sum(x > 1), [f32(1, 2, 3)], np.int64(2)),
        (lambda b, x: b.sum(x), [I32[2:3].repeat(3)], np.int64(3 * (2**31 - 1))),
        (lambda b, x: b.sum(x), [i64(BIG, 1)], np.int64(-(2**63))),
    ],
    "max": [
        (lambda b, x: b.max(x), [f32(-3, -2, -9)], np.float32(-2)),
        (lambda b, x: b.max(x), [i64(BIG, 1)], np.int64(BIG)),
    ],
    "cumsum": [
        (lambda b, x: b.cumsum(x), [f32(1, 2, 3)], f32(1, 3, 6)),
        (lambda b, x: b.cumsum(x), [i64(BIG, 1, 1)], i64(BIG, -(2**63), -(2**63) + 1)),
        (lambda b, x: b.cumsum(x > 1), [f32(2, 0, 2)], i64(1, 1, 2)),
        (lambda b, x: b.cumsum(x), [f32()], f32()),
    ],
    "sort": [
        (lambda b, x: b.sort(x), [f32(1, 3, -2, 3)], f32(3, 3, 1, -2)),
        (lambda b, x: b.sort(x), [i64(BIG, -(2**63), 0)], i64(BIG, 0, -(2**63))),
        (lambda b, x: b.sort(x), [f32()], f32()),
    ],
    "argmax": [
        (lambda b, x: b.argmax(x), [f32(1, 3, -2)], np.int64(1)),
        (lambda b, x: b.argmax(x), [f32(0, 2, 2, 2)], np.int64(1)),
        (lambda b, x: b.argmax(x), [np.ones(200_000, np.float32)], np.int64(0)),
        (lambda b, x: b.argmax(x), [np.arange(100_000, dtype=np.float32) // 99_000], np.int64(99_000)),
    ],
    "all_finite": [
        (lambda b, x: b.all_finite(x), [f32(1, 2)], np.True_),
        (lambda b, x: b.all_finite(x), [f32(1, np.inf)], np.False_),
        (lambda b, x: b.all_finite(x), [f32(np.nan, 1)], np.False_),
        (lambda b, x: b.all_finite(x), [f32()], np.True_),
    ],
    "kth_largest": [
        (lambda b, x: b.kth_largest(x, 1), [f32(3, 9, 9, 1)], np.float32(9)),
        (lambda b, x: b.kth_largest(x, 3), [f32(3, 9, 9, 1)], np.float32(3)),
        (lambda b, x: b.kth_largest(x, b.length(x)), [f32(3, 9, 9, 1)], np.float32(1)),
        (lambda b, x: b.kth_largest(x, 2), [f32(0, 0, 0)], np.float32(0)),
    ],
    "nonzero": [
        (lambda b, x: b.nonzero(x > 0), [f32(1, 0, 2, -1)], i64(0, 2)),
        (lambda b, x: b.nonzero(x > 0), [f32(0, 0)], i64()),
        (lambda b, x: b.nonzero(x > 0), [f32()], i64()),
    ],
    "take": [
        (lambda b, x, i: b.take(x, i), [f32(4, 5, 6), i64(2, 0, 2)], f32(6, 4, 6)),
        (lambda b, x, i: b.take(x, i), [f32(4, 5, 6), i64()], f32()),
    ],
    "put": [
        (lambda b, x, i, v: b.put(x, i, v), [f32(4, 5, 6), i64(2, 0), f32(1, 2)], f32(2, 5, 1)),
        (lambda b, x, i, v: b.put(x, i, v), [f32(4, 5), i64(), f32()], f32(4, 5)),
    ],
    "scatter_add_": [
        (lambda b, x, i, v: b.scatter_add_(fresh(b, x), i, v), [f32(4), i64(0, 0), f32(1, 2)], f32(7)),
        (lambda b, x, i, v: b.scatter_add_(fresh(b, x), i, v), [i64(BIG), i64(0), i64(1)], i64(-(2**63))),
        (lambda b, x, i, v: b.scatter_add_(fresh(b, x), i, v), [f32(4), i64(), f32()], f32(4)),
    ],
    "copy": [
        (lambda b, x: b.clear_(b.copy(x)), [f32(4, 5)], f32(0, 0)),  # what it copied stays as it is
        (lambda b, x: b.copy(x), [i64(4, 5)], i64(4, 5)),
    ],
    "add_": [
        (lambda b, x, y: b.add_(fresh(b, x), y), [f32(4, 5), f32(1, -5)], f32(5, 0)),
    ],
    "put_": [
        (lambda b, x, i, v: b.put_(fresh(b, x), i, v), [f32(4, 5, 6), i64(2, 0), f32(1, 2)], f32(2, 5, 1)),
        (lambda b, x, i, v: b.put_(fresh(b, x), i, v), [f32(4), i64(), f32()], f32(4)),
    ],
    "clear_": [
        (lambda b, x: b.clear_(fresh(b, x)), [f32(4, np.inf, np.nan)], f32(0, 0, 0)),
    ],
    "cond": [
        (lambda b, x: b.cond(b.sum(x) > 0, lambda: x[:1], lambda: -x), [f32(1, 2)], f32(1)),
        (lambda b, x: b.cond(b.sum(x) > 0, lambda: x[:1], lambda: -x), [f32(-1, -2)], f32(1, 2)),
    ],
    "check": [
        (lambda b, x: b.check(b.sum(x) > 0, "not positive", x), [f32(1, 2)], f32(1, 2)),
        (lambda b, x: b.check(True, "never", x), [f32()], f32()),
    ],
    "items": [
        (lambda b, x: b.constant([2 * i for i in b.items(x, 2)], "int64", x), [i64(3, -4)], i64(6, -8)),
    ],
    "host": [
        (lambda b, x: x if b.host(x) is None else b.from_host(b.host(x) + 1, x) - 1, [f32(4, 5)], f32(4, 5)),
    ],
    "from_host": [
        (lambda b, x: b.from_host(np.arange(3), x), [f32(4)], i64(0, 1, 2)),
    ],
}


def test_every_primitive_has_cases():
    assert sorted(CASES) == PRIMITIVES


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_primitive(on, primitive):
    for call, arrays, expected in CASES[primitive]:
        before = [a.copy() for a in arrays]
        result = on(call, *arrays)
        np.testing.assert_array_equal(result, expected)
        if primitive != "length":  # a length may be a plain int
            assert result.dtype == np.asarray(expected).dtype
        for array, copy in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("member", ["torch", "tensorflow", "tensorflow-traced"])
def test_bfloat16_bits(member):
    """bfloat16, which NumPy lacks, is the upper half of float32, rounded to nearest even."""
    values = f32(1, -2.5, 3.1415927, 1e-30, 65504)

    def bits(b, x):
        half = b.cast(x, "bfloat16")
        same = b.bitcast(b.bitcast(half, "int16"), "bfloat16")
        return b.concat([b.bitcast(half, "int16"), b.bitcast(same, "int16")])

    low = values.view(np.uint32)
    upper = ((low + 0x7FFF + ((low >> 16) & 1)) >> 16).astype(np.uint16).view(np.int16)
    np.testing.assert_array_equal(Runner(member)(bits, values), np.concatenate([upper, upper]))


def test_a_failed_check_raises(on):
    failure = MessageError
    if on.member == "tensorflow-traced":
        failure = pytest.importorskip("tensorflow").errors.InvalidArgumentError
    with pytest.raises(failure, match="not positive"):
        on(lambda b, x: b.check(b.sum(x) > 0, "not positive", x), f32(-1))


def test_host_arrays_share_memory():
    x = f32(1, 2)
    assert NUMPY.host(x) is x
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(3, requires_grad=True)
    b = backend_of(tensor)
    b.host(tensor)[1] = 5
    assert tensor[1] == 5
    b.from_host(x, tensor)[0] = 7
    assert x[0] == 7


def test_operators_agree(on):
    """The arrays' own operators, which the core uses beside the primitives."""
    x = i64(BIG, -(2**63), 12, -7)
    got = on(lambda b, x: b.concat([x + x, x * 3, x - 1, x & 6, x | 1, b.cast(x >= 12, "int64"), x[1:3]]), x)
    with np.errstate(over="ignore"):
        want = np.concatenate([x + x, x * 3, x - 1, x & 6, x | 1, (x >= 12).astype(np.int64), x[1:3]])
    np.testing.assert_array_equal(got, want)


def test_backend_is_found_by_the_array():
    """T36."""
    assert backend_of(f32(1)) is NUMPY
    torch = pytest.importorskip("torch")
    assert backend_of(torch.nn.Parameter(torch.zeros(1))).name == "torch"
    tf = pytest.importorskip("tensorflow")
    assert backend_of(tf.zeros(1)).name == "tensorflow"
    names = []
    tf.function(lambda x: names.append(backend_of(x).name))(tf.zeros(1))
    assert names == ["tensorflow"]
    with pytest.raises(ConfigurationError, match="pass a NumPy array"):
        backend_of(Fraction(1))
