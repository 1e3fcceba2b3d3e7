"""Kinds of values: error bounds, extremes, and equal bits on every path."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hvd_adaptive.core import kernels
from hvd_adaptive.core.backend import backend_of
from hvd_adaptive.core.errors import ConfigurationError
from hvd_adaptive.core.numpy_backend import NUMPY
from hvd_adaptive.core.values import KINDS, Fitted, value_kind

torch = pytest.importorskip("torch")

ANY = hnp.arrays(
    np.float32,
    st.integers(0, 70),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
    | st.sampled_from([0.0, -0.0, 1e-45, -1.1754944e-38, 3.4028235e38, 7e4, 1e-8, 1.0]),
)
EVERY = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
FITTED = pytest.mark.parametrize(
    "kind", [k for k in KINDS.values() if isinstance(k, Fitted)], ids=lambda k: k.name
)


def raw(x):
    return np.asarray(x).view(np.int32)


@EVERY
@given(values=ANY)
@settings(deadline=None, max_examples=50)
def test_bits_are_equal_on_every_path(kind, values):
    words = kind.encode(NUMPY, values)
    assert len(words) == kind.words(len(values)) and words.dtype == np.int32
    expected = kind.reconstruct(NUMPY, values)
    assert np.isfinite(expected).all()
    tensor = torch.from_numpy(values)
    np.testing.assert_array_equal(raw(kind.decode(NUMPY, words, len(values))), raw(expected))
    with kernels.disabled():
        for x in (values, tensor):
            b = backend_of(x)
            again = kind.encode(b, x)
            np.testing.assert_array_equal(np.asarray(again), words)
            np.testing.assert_array_equal(raw(kind.decode(b, again, len(values))), raw(expected))
            np.testing.assert_array_equal(raw(kind.reconstruct(b, x)), raw(expected))


@EVERY
def test_tensorflow_has_the_same_bits(kind):
    tf = pytest.importorskip("tensorflow")
    rng = np.random.default_rng(0)
    for values in (
        rng.standard_t(1.5, 333).astype(np.float32),
        np.zeros(5, np.float32),
        np.zeros(0, np.float32),
    ):
        tensor = tf.constant(values)
        b = backend_of(tensor)
        words = kind.encode(b, tensor)
        np.testing.assert_array_equal(words.numpy(), kind.encode(NUMPY, values))
        np.testing.assert_array_equal(
            raw(kind.decode(b, words, len(values))), raw(kind.reconstruct(NUMPY, values))
        )


@EVERY
def test_a_kind_states_what_it_does(kind):
    values = np.random.default_rng(0).standard_normal(3200).astype(np.float32)
    changed = not np.array_equal(kind.reconstruct(NUMPY, values), values)
    assert changed == kind.lossy
    assert len(kind.encode(NUMPY, values)) == kind.scale_words + 100 * kind.bits
    assert kind.error


def test_both_ends_of_the_range_survive_in_16_bits():
    """T50."""
    values = np.array([7e4, -1e-8, 3.0, 1e-8, -7e4, 0.0], dtype=np.float32)
    got = value_kind("fp16").reconstruct(NUMPY, values)
    nonzero = values != 0
    assert np.max(np.abs(got[nonzero] / values[nonzero] - 1)) < 2**-10.5
    assert got[~nonzero] == 0


@FITTED
@pytest.mark.parametrize("binades", [1, 3, 5])
def test_the_error_is_relative_and_falls_with_the_range(kind, binades):
    rng = np.random.default_rng(0)
    values = (2.0 ** rng.uniform(0, binades, 5000) * rng.choice([-1, 1], 5000)).astype(np.float32)
    span = np.abs(values).max() / np.abs(values).min()
    # A step is a straight line on at most one binade, along which the mantissa doubles.
    rungs = 2 ** (kind.bits - 1) - 2
    bound = (np.log2(span) + 0.09) / rungs / 2
    error = np.abs(kind.reconstruct(NUMPY, values) / values - 1).max()
    assert 0.5 * bound < error <= bound * 1.001 + 2**-23


@FITTED
@given(values=ANY)
@settings(deadline=None, max_examples=100)
def test_no_error_exceeds_the_value(kind, values):
    """What makes error feedback a contraction."""
    error = np.abs(kind.reconstruct(NUMPY, values).astype(np.float64) - values)
    assert np.all(error <= np.abs(values.astype(np.float64)))


@pytest.mark.parametrize("bits", [4, 8])
def test_heavy_tails_lose_less_than_with_a_uniform_step(bits):
    """Against rounding to multiples of max / (2**(bits - 1) - 1), on the largest 1 %."""
    values = np.random.default_rng(0).standard_t(2, 200_000).astype(np.float32)
    values = values[np.abs(values) >= np.quantile(np.abs(values), 0.99)]
    step = np.abs(values).max() / (2 ** (bits - 1) - 1)
    uniform = np.linalg.norm(np.round(values / step) * step - values)
    ours = np.linalg.norm(value_kind(f"int{bits}").reconstruct(NUMPY, values) - values)
    assert ours < 0.5 * uniform


def test_bf16_rounds_as_the_hardware_does():
    values = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    expected = np.where(np.isinf(expected), np.copysign(np.float32(3.3895314e38), values), expected)
    np.testing.assert_array_equal(raw(value_kind("bf16").reconstruct(NUMPY, values)), raw(expected))


@given(values=ANY, seed=st.integers(0, 99))
@settings(deadline=None, max_examples=100)
def test_sign_scale_is_the_mean_magnitude_in_any_order(values, seed):
    kind = value_kind("sign")
    got = kind.reconstruct(NUMPY, values)
    if len(values):
        mean = np.float32(np.mean(np.abs(values.astype(np.float64))))
        # Each term loses less than 2**-29 of the largest.
        tolerance = 2.0**-29 * np.abs(values.astype(np.float64)).max() + 2.0**-23 * float(mean) + 2.0**-149
        assert np.all(np.abs(np.abs(got.astype(np.float64)) - mean) <= tolerance)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(values))
    shuffled = np.random.default_rng(seed).permutation(values)
    assert set(np.abs(kind.reconstruct(NUMPY, shuffled))) == set(np.abs(got))


def test_an_unknown_kind_is_named():
    with pytest.raises(
        ConfigurationError, match=re.escape("values='float8' is not known; choose one of fp32, fp16")
    ):
        value_kind("float8")
