"""The wire message: round trips, equal bits on every backend, sizes, sums, and refusals."""

import math
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.core import kernels, message
from hvd_adaptive.core.errors import ConfigurationError, MessageError
from hvd_adaptive.core.values import KINDS

torch = pytest.importorskip("torch")

KIND = st.sampled_from(sorted(KINDS))


@st.composite
def sparse(draw, least=0, most=1 << 20):
    """``(indices, values, dimension)``: uniform or clustered supports, heavy-tailed values."""
    dimension = draw(st.integers(max(least, 1), most))
    count = draw(st.integers(least, min(dimension, 300)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        indices = rng.choice(dimension, count, replace=False)
    else:
        starts = rng.integers(0, dimension, 1 + count // 20)
        indices = (rng.choice(starts, count) + rng.integers(0, 40, count)) % dimension
    indices = np.unique(indices).astype(np.int64)
    values = rng.standard_t(1.5, len(indices)) * 10.0 ** draw(st.integers(-9, 5))
    return indices, values.astype(np.float32), dimension


def bits_of(x):
    return np.asarray(x).view(np.int32)


@given(sparse(), KIND, st.booleans())
@settings(deadline=None, max_examples=80)
def test_round_trip_and_equal_bits(case, kind, pad):
    indices, values, dimension = case
    words = message.encode(indices, values, dimension, kind, pad=pad)
    assert words.dtype == np.int32 and len(words) % 2 == 0
    got_indices, got_values = message.decode(words, dimension)
    np.testing.assert_array_equal(got_indices, indices)
    np.testing.assert_array_equal(bits_of(got_values), bits_of(message.decoded_values(values, kind)))

    for compiled in (True, False):
        with nullcontext() if compiled else kernels.disabled():
            tensors = torch.from_numpy(indices), torch.from_numpy(values)
            np.testing.assert_array_equal(message.encode(*tensors, dimension, kind, pad=pad).numpy(), words)
            got_indices, got_values = message.decode(torch.from_numpy(words), dimension, kind)
            np.testing.assert_array_equal(got_indices.numpy(), indices)
            expected = message.decoded_values(tensors[1], kind)
            np.testing.assert_array_equal(bits_of(got_values), bits_of(expected))
            np.testing.assert_array_equal(message.encode(indices, values, dimension, kind, pad=pad), words)


@given(st.lists(sparse(most=1000), min_size=1, max_size=4), KIND, st.integers(0, 2**32))
@settings(deadline=None, max_examples=40)
def test_accumulate_adds_in_rank_order(cases, kind, seed):
    dimension = max(case[2] for case in cases)
    parts, expected = [], np.zeros(dimension, np.float32)
    for indices, values, _ in cases:
        parts.append(message.encode(indices, values, dimension, kind))
        expected[indices] += message.decoded_values(values, kind)
    dense = np.random.default_rng(seed).standard_normal(dimension).astype(np.float32)
    parts.append(message.encode_dense(dense, kind))
    expected += message.decoded_values(dense, kind)
    words = np.concatenate(parts)
    for part, again in zip(parts, message.split(words, len(parts)), strict=True):
        np.testing.assert_array_equal(part, again)
    np.testing.assert_array_equal(message.accumulate(words, len(parts), dimension), expected)
    for compiled in (True, False):
        with nullcontext() if compiled else kernels.disabled():
            got = message.accumulate(torch.from_numpy(words), len(parts), dimension)
        np.testing.assert_array_equal(got.numpy(), expected)


@pytest.mark.parametrize("compiled", [True, False])
def test_accumulate_into_given_storage(compiled):
    words = message.encode(np.array([1, 4]), np.array([1.0, -2.0], np.float32), 6)
    with nullcontext() if compiled else kernels.disabled():
        old = np.full(6, np.nan, np.float32)
        assert message.accumulate(words, 1, 6, into=old) is old
        np.testing.assert_array_equal(old, [0, 1, 0, 0, -2, 0])
        tensor = torch.full((6,), torch.inf)
        got = message.accumulate(torch.from_numpy(words), 1, 6, into=tensor)
        np.testing.assert_array_equal(got, old)
        assert got.data_ptr() == tensor.data_ptr()
        with pytest.raises(ConfigurationError, match="into= must be float32 with 6 elements"):
            message.accumulate(words, 1, 6, into=old[:5])


def entropy(dimension, count):
    """log2 of the number of supports, per coordinate."""
    log = math.lgamma(dimension + 1) - math.lgamma(count + 1) - math.lgamma(dimension - count + 1)
    return log / math.log(2) / count


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("ratio", [1e-4, 1e-3, 1e-2, 3e-2, 6e-2, 8e-2, 1e-1])
def test_size_is_within_a_tenth_of_the_entropy(kind, ratio):
    dimension = 1 << 22
    count = round(dimension * ratio)
    rng = np.random.default_rng(1)
    indices = np.sort(rng.choice(dimension, count, replace=False))
    words = message.encode(indices, rng.standard_normal(count).astype(np.float32), dimension, kind, pad=False)
    # The header and the scales are the price of a message, not of a coordinate.
    bits = 32 * (len(words) - message.HEADER_WORDS - KINDS[kind].scale_words)
    assert bits <= 1.10 * count * (entropy(dimension, count) + KINDS[kind].bits)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(
    "rows, width, inside", [(500, 512, 0.2), (500, 512, 1.0), (60, 64, 0.9), (4000, 300, 0.4)]
)
def test_size_of_clusters_is_below_that_of_scattered_coordinates(kind, rows, width, inside):
    """Rows of an embedding, of which some coordinates each are sent."""
    dimension = 5_000_000
    rng = np.random.default_rng(1)
    first = np.sort(rng.choice(dimension // width, rows, replace=False)) * width
    indices = (first[:, None] + np.arange(width))[rng.random((rows, width)) < inside]
    count = len(indices)
    words = message.encode(indices, rng.standard_normal(count).astype(np.float32), dimension, kind, pad=False)
    bits = 32 * (len(words) - message.HEADER_WORDS - KINDS[kind].scale_words)
    assert bits <= count * (entropy(dimension, count) + KINDS[kind].bits)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_types_of_values_are_converted(dtype):
    values = torch.tensor([1.5, -3.0, 1e-3]).to(getattr(torch, dtype))
    _, got = message.decode(message.encode(torch.arange(3), values, 9), 9)
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy(), values.to(torch.float32).numpy())
    np.testing.assert_array_equal(message.decoded_values(values).numpy(), got.numpy())


def test_arguments_are_left_alone():
    indices, values = np.array([1, 4]), np.array([1.0, -2.0], np.float32)
    words = message.encode(indices, values, 6, "int4")
    copies = indices.copy(), values.copy(), words.copy()
    message.accumulate(np.concatenate([words, words]), 2, 6)
    message.decode(words)
    for array, copy in zip((indices, values, words), copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_empty_and_full_messages():
    for dimension in (0, 1, 5):
        words = message.encode(np.zeros(0, np.int64), np.zeros(0, np.float32), dimension)
        assert [len(part) for part in message.decode(words, dimension)] == [0, 0]
    values = np.arange(5, dtype=np.float32)
    for words in (message.encode(np.arange(5), values, 5), message.encode_dense(values)):
        indices, got = message.decode(words, 5)
        np.testing.assert_array_equal(indices, np.arange(5))
        np.testing.assert_array_equal(got, values)


def test_lengths_fall_on_a_coarse_grid():
    values = np.ones(5000, np.float32)
    lengths = {len(message.encode_dense(values[:n])) for n in range(2500, 5000)}
    assert len(lengths) <= 17
    for n in range(200, 5000, 37):
        words = message.encode_dense(values[:n])
        useful, sent = message.size(words)
        assert useful == 32 * (message.HEADER_WORDS + n) and sent == 32 * len(words)
        assert useful <= sent <= useful * (1 + 1 / 16) + 64


@pytest.mark.parametrize("indices", [[1, 1], [2, 1], [-1, 3], [3, 10], [9, 2**40]])
def test_encode_refuses_bad_indices(indices):
    with pytest.raises(MessageError, match=r"ascend strictly within 0 \.\. 9"):
        message.encode(np.array(indices), np.ones(2, np.float32), 10)


def test_encode_refuses_bad_settings():
    one = np.ones(1, np.float32)
    with pytest.raises(ConfigurationError, match="values='fp8' is not known; choose one of"):
        message.encode_dense(one, "fp8")
    with pytest.raises(ConfigurationError, match="dimension="):
        message.encode(np.zeros(1, np.int64), one, 1 << 48)


def test_decode_refuses_another_dimension_kind_or_neighbour():
    words = message.encode(np.array([3]), np.ones(1, np.float32), 10)
    with pytest.raises(MessageError, match="another dimension than 11"):
        message.decode(words, 11)
    with pytest.raises(MessageError, match="another kind than fp16"):
        message.decode(words, 10, "fp16")
    with pytest.raises(MessageError, match="data is left after the last of 1"):
        message.split(np.concatenate([words, words]), 1)
    with pytest.raises(MessageError, match="message 2 of 3 is cut off"):
        message.split(np.concatenate([words, words]), 3)


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_tensorflow_traced(kind):
    """The same code as a graph of unknown lengths: the same bits, and errors at run time."""
    tf = pytest.importorskip("tensorflow")
    graph = partial(tf.function, autograph=False)  # which is slow, and has nothing to convert
    dimension = 5000
    any_length = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.float32)]
    encode = graph(lambda i, v: message.encode(i, v, dimension, kind), any_length)
    any_words = [tf.TensorSpec([None], tf.int32)]
    decode = graph(lambda w: message.decode(w, dimension, kind), any_words)
    accumulate = graph(lambda w: message.accumulate(w, 2, dimension, kind), any_words)
    rng = np.random.default_rng(0)
    clustered = np.unique(np.concatenate([np.arange(700, 900), rng.integers(0, dimension, 4)]))
    empty, regular, full = np.zeros(0, np.int64), np.arange(3, dimension, 9), np.arange(dimension)
    for indices in (empty, np.array([7]), clustered, full, regular):
        values = rng.standard_t(2, len(indices)).astype(np.float32)
        words = message.encode(indices, values, dimension, kind)
        np.testing.assert_array_equal(encode(indices, values), words)
        got_indices, got_values = decode(words)
        np.testing.assert_array_equal(got_indices, indices)
        np.testing.assert_array_equal(bits_of(got_values), bits_of(message.decoded_values(values, kind)))
        dense = message.encode_dense(rng.standard_normal(dimension).astype(np.float32), kind)
        both = np.concatenate([dense, words])
        np.testing.assert_array_equal(accumulate(both), message.accumulate(both, 2, dimension))
    broken = np.array(words)
    broken[len(words) // 2] ^= 4
    with pytest.raises(tf.errors.InvalidArgumentError, match="wrong checksum"):
        decode(broken)
    with pytest.raises(ConfigurationError, match="pass kind="):
        graph(lambda w: message.decode(w, dimension), any_words)(words)
