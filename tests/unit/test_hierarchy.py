"""Who reduces with whom, and who speaks for which tensor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.core.errors import ConfigurationError
from hvd_adaptive.core.hierarchy import Hierarchy, speakers


@given(st.integers(1, 6), st.integers(2, 6))
def test_every_rank_has_one_set_inside_and_one_across(hosts, per_host):
    hierarchy = Hierarchy.of(list(range(per_host)) * hosts)
    size = hosts * per_host
    assert hierarchy.ranks_per_host == per_host
    assert sorted(rank for group in hierarchy.inside for rank in group) == list(range(size))
    assert sorted(rank for group in hierarchy.across for rank in group) == list(range(size))
    for rank in range(size):
        host, position = hierarchy.place(rank)
        assert hierarchy.inside[host][position] == hierarchy.across[position][host] == rank
    assert all(
        len(set(inside) & set(across)) == 1 for inside in hierarchy.inside for across in hierarchy.across
    )


@pytest.mark.parametrize(
    ("local_ranks", "words"),
    [
        ([0, 0, 0], "two or more ranks per host"),
        ([0, 1, 0], "1 to 2 ranks"),
        ([0, 0, 1, 1], "not 0, 1, ..."),
        ([1, 0], "not 0, 1, ..."),
    ],
)
def test_what_cannot_be_a_hierarchy(local_ranks, words):
    with pytest.raises(ConfigurationError, match=words):
        Hierarchy.of(local_ranks)


def test_a_rank_of_no_host():
    with pytest.raises(ConfigurationError, match="rank 4 is on none"):
        Hierarchy.of([0, 1, 0, 1]).place(4)


dimensions = st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 10**6), min_size=1, max_size=30)


@given(dimensions, st.integers(1, 8))
def test_speakers_share_the_work(sizes, ranks):
    chosen = speakers(sizes, ranks)
    assert list(chosen) == list(sizes) and set(chosen.values()) <= set(range(ranks))
    loads = [sum(d for name, d in sizes.items() if chosen[name] == rank) for rank in range(ranks)]
    # Graham's bound for the largest first, with the best division not below either of these
    best = max(sum(sizes.values()) / ranks, max(sizes.values()))
    if len(sizes) > ranks:
        two_on_one = sorted(sizes.values(), reverse=True)[ranks - 1 : ranks + 1]
        best = max(best, sum(two_on_one))
    assert max(loads) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-6


@given(dimensions, st.integers(1, 8))
def test_speakers_are_the_same_whatever_the_order_of_equal_runs(sizes, ranks):
    assert speakers(sizes, ranks) == speakers(dict(sizes), ranks)
