"""Supports: exact counts, thresholds, and the shared random draw."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_adaptive.core import scan, selection
from hvd_adaptive.core.backend import backend_of

# Few distinct values make ties and zeros common.
_values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 3.5, -3.5, 1e-30, -1e30])
vectors = arrays(np.float32, st.integers(1, 60), elements=_values) | arrays(
    np.float32, st.integers(1, 60), elements=st.floats(-100, 100, width=32)
)
both = pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])


def reference(x: np.ndarray, count: int) -> list[int]:
    """The ``count`` largest magnitudes, the lowest index first among equals, without zeros."""
    order = sorted(range(x.size), key=lambda i: (-abs(x[i]), i))[:count]
    return sorted(i for i in order if x[i] != 0)


@both
@given(x=vectors, data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_largest_are_exact_with_ties_and_zeros(convert, x, data):
    """T78."""
    count = data.draw(st.integers(1, x.size))
    y = convert(x)
    found = selection.largest(backend_of(y), y, count)
    assert found.tolist() == reference(x, count)


@both
@given(x=vectors, threshold=st.floats(0, 200, width=32))
@settings(max_examples=100, deadline=None)
def test_above_a_threshold(convert, x, threshold):
    y = convert(x)
    b = backend_of(y)
    found = selection.above(b, y, b.constant(threshold, "float32", y)).tolist()
    magnitude = np.abs(x)
    if magnitude.max() >= threshold:
        assert found == np.flatnonzero((magnitude >= np.float32(threshold)) & (magnitude > 0)).tolist()
    else:  # something is always sent, unless there is nothing
        assert found == np.flatnonzero((magnitude == magnitude.max()) & (magnitude > 0)).tolist()


def test_zeros_are_never_sent():
    x = np.zeros(100, np.float32)
    b = backend_of(x)
    assert selection.largest(b, x, 10).size == 0
    assert selection.above(b, x, np.float32(0)).size == 0
    assert selection.sampled(b, x, 10).size == 0


def test_a_small_tensor_is_its_own_sample():
    x = np.random.default_rng(0).standard_normal(selection.SAMPLE).astype(np.float32)
    assert selection.sample(backend_of(x), x) is x
    for count in (1, 7, 500, x.size):
        found = selection.sampled(backend_of(x), x, count)
        assert found.tolist() == reference(x, count)


@both
@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
def test_the_sampled_count_has_the_stated_error(convert, ratio):
    dimension = 1 << 18
    count = int(ratio * dimension)
    errors = []
    for seed in range(40):
        x = convert(np.random.default_rng(seed).standard_normal(dimension).astype(np.float32))
        b = backend_of(x)
        found = selection.sampled(b, x, count)
        magnitude = abs(x)
        assert magnitude[found].min() > np.sort(np.asarray(magnitude))[: dimension - len(found)].max()
        errors.append(len(found) / count - 1)
    # The k-th largest of s samples lets through k / s with relative standard deviation 1 / sqrt(k).
    stated = 1 / np.sqrt(selection.SAMPLE * ratio)
    assert np.std(errors) < 1.5 * stated
    assert abs(np.mean(errors)) < 0.7 * stated + stated**2


@both
@given(
    dimension=st.integers(1, 5000),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**31 - 1),
    step=st.integers(0, 10**9),
)
@settings(max_examples=150, deadline=None)
def test_shared_random_coordinates_are_distinct(convert, dimension, share, seed, step):
    like = convert(np.zeros(1, np.float32))
    count = max(1, int(share * dimension))
    found = selection.shared_random(backend_of(like), like, dimension, count, seed, step)
    assert len(found) == count
    assert len(set(found.tolist())) == count
    assert int(min(found)) >= 0 and int(max(found)) < dimension
    again = selection.shared_random(backend_of(like), like, dimension, count, seed, step)
    assert found.tolist() == again.tolist()


def test_shared_random_is_the_same_on_every_backend():
    x, y = np.zeros(1, np.float32), torch.zeros(1)
    ours = selection.shared_random(backend_of(x), x, 12345, 678, 9, 10)
    theirs = selection.shared_random(backend_of(y), y, 12345, 678, 9, 10)
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("dimension, count", [(10, 3), (64, 1), (101, 50), (7, 7)])
def test_every_coordinate_is_drawn_equally_often(dimension, count):
    like = np.zeros(1, np.float32)
    b = backend_of(like)
    draws = 4000
    times = np.zeros(dimension)
    for step in range(draws):
        times[selection.shared_random(b, like, dimension, count, 3, step)] += 1
    probability = count / dimension
    deviation = np.sqrt(draws * probability * (1 - probability))
    assert np.abs(times - draws * probability).max() <= 5 * deviation


def test_the_contraction_of_shared_random_is_k_over_d():
    """E |x - x_T|^2 = (1 - k / d) |x|^2, the contraction of rand-k, for a vector of any shape."""
    rng = np.random.default_rng(5)
    dimension, count, draws = 300, 30, 4000
    x = rng.standard_normal(dimension) * np.exp(rng.standard_normal(dimension))
    like = np.zeros(1, np.float32)
    kept = [
        np.square(x[selection.shared_random(backend_of(like), like, dimension, count, 8, step)]).sum()
        for step in range(draws)
    ]
    error = np.std(kept) / np.sqrt(draws)
    assert abs(np.mean(kept) - count / dimension * np.square(x).sum()) < 4 * error


def test_steps_and_seeds_give_other_coordinates():
    like = np.zeros(1, np.float32)
    b = backend_of(like)
    draws = {
        tuple(selection.shared_random(b, like, 1000, 50, seed, step).tolist())
        for seed in range(5)
        for step in range(20)
    }
    assert len(draws) == 100


def test_float64_is_selected_by_its_values():
    x = np.random.default_rng(0).standard_normal(5000)
    assert selection.largest(backend_of(x), x, 50).tolist() == sorted(np.argsort(-np.abs(x))[:50].tolist())


@both
@given(
    pair=st.integers(1, 700).flatmap(
        lambda d: st.tuples(
            arrays(np.float32, d, elements=_values),
            arrays(np.float32, d, elements=_values | st.sampled_from([np.nan, np.inf, -np.inf])),
        )
    ),
    threshold=st.sampled_from([0.0, 1e-20, 1.0, 2.0, 1e30, np.inf]),
    workers=st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_one_pass_adds_what_is_finite_and_finds_what_is_large(convert, pair, threshold, workers):
    total, x = (convert(a.copy()) for a in pair)
    good = np.where(np.isfinite(pair[1]), pair[1], 0).astype(np.float32)
    expected = np.where(np.isfinite(pair[1]), pair[0] + good, pair[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "_CHUNK", 64)
        patch.setenv("OMP_NUM_THREADS", str(workers))
        found, finite = scan.add_at_least(np.asarray(total), np.asarray(x), threshold)
    np.testing.assert_array_equal(np.asarray(total), expected)
    assert found.tolist() == scan.at_least(expected, threshold).tolist()
    assert finite == np.isfinite(pair[1]).all()
