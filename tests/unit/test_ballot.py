"""The ballot: what ranks agree on must survive any reduction that Horovod offers, in float32."""

import numpy as np
import pytest

from hvd_adaptive.core import ballot
from hvd_adaptive.core.numpy_backend import NUMPY

LIKE = np.zeros(1, np.float32)
REDUCTIONS = ["average", "sum", 1.0, 2.0, 3.0, 10.0, 0.1]  # numbers: gradient_predivide_factor
SIZES = [1, 2, 3, 4, 7, 64, 100, 513, 1024]


def cast(rank, fingerprint=0xDEADBEEF, phase=5, **fields):
    """One rank's ballot."""
    values = {"nonfinite": False, "improvement": 0.0, "energy": 0.0, "fixed": 0.0, "variable": 0.0}
    values |= {"sparse_time": 0.0, "dense_time": 0.0, "alternative": 0.0}
    values |= fields
    scalars = {key: np.float32(value) for key, value in values.items()}
    return ballot.make(NUMPY, LIKE, rank=np.float32(rank), fingerprint=fingerprint, phase=phase, **scalars)


def reduced(ballots, reduction):
    """As Horovod does it: scaled, summed one after the other, scaled again, in float32."""
    count = len(ballots)
    if reduction == "sum":
        before, after = 1.0, 1.0
    elif reduction == "average":
        before, after = 1.0, 1.0 / count
    else:
        before, after = 1.0 / reduction, reduction / count
    total = np.zeros_like(ballots[0])
    for one in ballots:
        total = total + one * np.float32(before)
    return total * np.float32(after)


def read(ballots, reduction, ranks, fingerprint=0xDEADBEEF, phase=5):
    return ballot.tally(reduced(ballots, reduction), ranks, fingerprint, phase)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("fingerprint", [0, 0xFFFFFFFF, 0x12345678])
def test_equal_settings_are_found_equal(count, reduction, fingerprint):
    for ranks in (range(count), range(0, 2 * count, 2)):
        votes = [cast(rank, fingerprint, 7) for rank in ranks]
        tally = read(votes, reduction, list(ranks), fingerprint, 7)
        assert tally.same_settings and tally.same_members and tally.same_phase and not tally.nonfinite


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("count", SIZES[1:])
@pytest.mark.parametrize("others", [0xDEADBEEE, 0xDEADBEEF ^ 8, 0, 1 << 17])
def test_one_rank_with_other_settings_is_found_by_all(count, reduction, others):
    """T31."""
    for odd in {0, count // 2, count - 1}:
        votes = [cast(rank, others if rank == odd else 0xDEADBEEF) for rank in range(count)]
        ranks = list(range(count))
        assert not read(votes, reduction, ranks).same_settings
        assert not read(votes, reduction, ranks, others).same_settings
        assert read(votes, reduction, ranks).same_phase


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("count", SIZES[1:])
def test_one_rank_at_another_step_is_found_by_all(count, reduction):
    for mine, theirs in [(0, 1), (7, 0), (3, 4)]:
        votes = [cast(rank, phase=theirs if rank == count - 1 else mine) for rank in range(count)]
        ranks = list(range(count))
        for phase in (mine, theirs):
            tally = read(votes, reduction, ranks, phase=phase)
            assert tally.same_settings and not tally.same_phase


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "told, voted",
    [([0, 1], [0, 1, 2, 3]), ([0, 2], [1, 3]), ([0, 1, 2, 3], [0, 2]), ([0, 3], [1, 2]), ([0], [0, 1])],
)
def test_other_members_are_found(reduction, told, voted):
    assert not read([cast(rank) for rank in voted], reduction, told).same_members


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("count", [1, 2, 4, 1000])
def test_numbers_are_means_over_the_ranks(count, reduction):
    rng = np.random.default_rng(count)
    improvement, energy, fixed, variable = rng.random((4, count)) * [[1e-12], [1e9], [1e-3], [1e6]]
    votes = [
        cast(r, improvement=improvement[r], energy=energy[r], fixed=fixed[r], variable=variable[r])
        for r in range(count)
    ]
    tally = read(votes, reduction, list(range(count)))
    found = [tally.improvement, tally.energy, tally.fixed, tally.variable]
    expected = [v.mean() for v in (improvement, energy, fixed, variable)]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("count", SIZES)
def test_one_rank_that_is_not_finite_is_seen(count, reduction):
    votes = [cast(rank, nonfinite=rank == count - 1) for rank in range(count)]
    assert read(votes, reduction, list(range(count))).nonfinite
    assert bool(ballot.nonfinite(reduced(votes, reduction)))


@pytest.mark.parametrize(
    "reduction, factor", [("average", "mean"), ("sum", "sum"), (2.0, "mean"), (3.0, "mean")]
)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 64])
def test_the_scale_of_an_aggregate_is_that_of_the_reduction(count, reduction, factor):
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((count, 50)).astype(np.float32)
    scale = ballot.scale(reduced([cast(rank) for rank in range(count)], reduction), count)
    expected = getattr(gradients.astype(np.float64), factor)(axis=0)
    np.testing.assert_allclose(gradients.sum(axis=0) * scale, expected, rtol=1e-5, atol=1e-6)


def test_its_size_is_stated():
    assert cast(0).shape == (ballot.SIZE,) and cast(0).dtype == np.float32
