"""Bit packing and the two codes of ascending indices, on every path."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.core import bits, hashing, kernels
from hvd_adaptive.core.backend import backend_of
from hvd_adaptive.core.errors import MessageError
from hvd_adaptive.core.numpy_backend import NUMPY

torch = pytest.importorskip("torch")


@st.composite
def supports(draw):
    """``(indices, dimension)``, from lone coordinates to solid blocks, small and huge dimensions."""
    dimension = draw(st.sampled_from([1, 2, 40, 1000, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 40]))
    count = draw(st.integers(0, min(dimension, 200)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([1, 3, 50, dimension]))
    starts = rng.integers(0, dimension, 1 + count // draw(st.sampled_from([1, 10, 100])))
    indices = (rng.choice(starts, count) + rng.integers(0, spread, count)) % dimension
    return np.unique(indices).astype(np.int64), dimension


@given(supports())
@settings(deadline=None, max_examples=100)
def test_indices_round_trip_with_equal_bits_on_every_path(support):
    indices, dimension = support
    planes = bits.encode_indices(NUMPY, indices, dimension)
    tensor = torch.from_numpy(indices)
    with kernels.disabled():
        for x in (indices, tensor):
            b = backend_of(x)
            again = bits.encode_indices(b, x, dimension)
            assert (again.code, again.width) == (planes.code, planes.width)
            np.testing.assert_array_equal(np.asarray(again.low), planes.low)
            np.testing.assert_array_equal(np.asarray(again.unary), planes.unary)
            decoded = bits.decode_indices(b, again, len(indices), dimension)
            np.testing.assert_array_equal(np.asarray(decoded), indices)
    np.testing.assert_array_equal(bits.decode_indices(NUMPY, planes, len(indices), dimension), indices)


@pytest.mark.parametrize(
    "code, indices",
    [
        (bits.RICE, np.arange(1, 60) * 37),
        (bits.GOLOMB, np.concatenate([np.arange(200), np.arange(1, 9) * 9000])),
    ],
)
def test_planes_that_do_not_fit_are_refused(code, indices):
    dimension = int(indices[-1]) + 1
    planes = bits.encode_indices(NUMPY, indices, dimension)
    assert planes.code == code
    flaws = [
        (planes._replace(low=planes.low[:-1]), len(indices), dimension, "planes of its indices do not fit"),
        (planes._replace(low=np.append(planes.low, planes.low)), len(indices), dimension, "do not fit"),
        (planes, len(indices) + 1, dimension, "another count of indices than it states"),
        (planes, len(indices) - 1, dimension, "another count of indices than it states"),
        (planes, len(indices), dimension - 1, "an index is beyond the dimension"),
        (planes._replace(width=31), len(indices), dimension, "an index is beyond|do not fit"),
    ]
    for broken, count, limit, sentence in flaws:
        with pytest.raises(MessageError, match=sentence):
            bits.decode_indices(NUMPY, broken, count, limit)
        with kernels.disabled(), pytest.raises(MessageError, match=sentence):
            bits.decode_indices(NUMPY, broken, count, limit)


@given(st.lists(st.tuples(st.integers(0, 31), st.integers(0, 2**31 - 1)), max_size=70))
@settings(deadline=None, max_examples=100)
def test_pack_and_unpack_fields_of_any_width(fields):
    widths = np.array([width for width, _ in fields], dtype=np.int64)
    codes = np.array([value % (1 << width) for width, value in fields], dtype=np.int64)
    offsets = np.cumsum(widths) - widths
    total = int(widths.sum())
    words = bits.pack(NUMPY, codes, offsets, bits.words_for(total))
    as_number = sum(int(w) % (1 << 32) << (32 * i) for i, w in enumerate(words))
    assert as_number == sum(int(c) << int(o) for c, o in zip(codes, offsets, strict=True))
    np.testing.assert_array_equal(bits.unpack(NUMPY, words, offsets, (1 << widths) - 1), codes)


def test_ones_finds_the_bits_that_are_set():
    words = np.array([0, -(2**31), 5, -1], dtype=np.int32)
    np.testing.assert_array_equal(bits.ones(NUMPY, words), [63, 64, 66, *range(96, 128)])


@given(st.integers(1, 1 << 48), st.integers(0, 1 << 31))
@settings(deadline=None, max_examples=100)
def test_rice_width_is_the_same_for_a_number_and_a_scalar_array(dimension, count):
    count = min(count, dimension)
    scalar = torch.tensor(count)
    width = bits.rice_width(backend_of(scalar), dimension, scalar)
    assert int(width) == bits.rice_width(NUMPY, dimension, count)


@pytest.mark.parametrize("ratio", [1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.5])
def test_rice_width_is_the_best_one(ratio):
    dimension = 1 << 21
    rng = np.random.default_rng(0)
    indices = np.sort(rng.choice(dimension, round(ratio * dimension), replace=False))
    gaps = np.diff(indices, prepend=-1) - 1
    sizes = [int(np.sum((gaps >> width) + 1 + width)) for width in range(20)]
    chosen = bits.encode_indices(NUMPY, indices, dimension)
    assert chosen.code == bits.RICE
    assert sizes[chosen.width] <= 1.003 * min(sizes)


def test_clusters_get_the_code_that_suits_them():
    """A fifth of the coordinates in 500 rows of 512, as in the gradient of an embedding."""
    rng = np.random.default_rng(0)
    dimension = 5_000_000
    rows = np.sort(rng.choice(dimension // 512, 500, replace=False)) * 512
    indices = (rows[:, None] + np.arange(512))[rng.random((500, 512)) < 0.2]
    planes = bits.encode_indices(NUMPY, indices, dimension)
    assert planes.code == bits.GOLOMB
    gaps = np.diff(indices, prepend=-1) - 1
    rice = min(np.sum((gaps >> width) + 1 + width) for width in range(24))
    assert 32 * (len(planes.low) + len(planes.unary)) < 0.55 * rice


def test_integers_are_a_function_of_seed_and_step():
    like = np.zeros(1, np.float32)
    first = hashing.integers(NUMPY, like, 7, 3, 1000)
    np.testing.assert_array_equal(first[:10], hashing.integers(NUMPY, like, 7, 3, 10))
    assert first.min() >= 0 and len(np.unique(first)) == 1000
    for seed, step in ((8, 3), (7, 4), (3, 7), (-7, 3), (7 + 2**64 - 1, 3)):
        assert not np.any(first == hashing.integers(NUMPY, like, seed, step, 1000))
    on_torch = hashing.integers(backend_of(torch.zeros(1)), torch.zeros(1), 7, torch.tensor(3), 1000)
    np.testing.assert_array_equal(on_torch.numpy(), first)


def test_uniform_is_uniform():
    like = np.zeros(1, np.float32)
    draws = hashing.uniform(NUMPY, like, 1, 0, 100_000)
    assert draws.dtype == np.float32 and draws.min() >= 0 and draws.max() < 1
    counts = np.bincount((draws * 64).astype(int), minlength=64)
    # Chi-squared with 63 degrees of freedom: beyond 120 once in 60,000.
    assert np.sum((counts - 1562.5) ** 2 / 1562.5) < 120
    serial = np.corrcoef(draws[1:], draws[:-1])[0, 1]
    across = np.corrcoef(draws, hashing.uniform(NUMPY, like, 1, 1, 100_000))[0, 1]
    assert abs(serial) < 0.015 and abs(across) < 0.015


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40), st.data())
@settings(deadline=None, max_examples=100)
def test_checksum_is_equal_on_every_path_and_finds_changes(half, data):
    words = np.array(half + half[::-1], dtype=np.int32)
    expected = hashing.checksum(NUMPY, words)
    with kernels.disabled():
        np.testing.assert_array_equal(hashing.checksum(NUMPY, words), expected)
        tensor = torch.from_numpy(words)
        np.testing.assert_array_equal(hashing.checksum(backend_of(tensor), tensor).numpy(), expected)
    changed = words.copy()
    changed[0] ^= 1
    np.testing.assert_array_equal(hashing.checksum(NUMPY, changed), expected)  # its own place
    at = data.draw(st.integers(1, len(words) - 1))
    changed[at] ^= np.array(data.draw(st.integers(1, 2**32 - 1)), np.uint32).view(np.int32)
    assert hashing.checksum(NUMPY, changed)[0] != expected[0]
    i, j = data.draw(st.tuples(st.integers(1, len(words) - 1), st.integers(1, len(words) - 1)))
    swapped = words.copy()
    swapped[[i, j]] = swapped[[j, i]]
    assert (hashing.checksum(NUMPY, swapped)[0] == expected[0]) == (words[i] == words[j])
