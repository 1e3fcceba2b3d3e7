"""Policies: exact T at every step, and the thresholds of the adaptive one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_adaptive.core.backend import backend_of
from hvd_adaptive.core.cost import Affine, LinkTime, PayloadBits, SignPayloadBits
from hvd_adaptive.core.errors import ConfigurationError
from hvd_adaptive.core.policy import Adaptive, Control, Fixed, SharedRandom, Warmup, count, sends_all
from hvd_adaptive.core.selection import SAMPLE

both = pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])


def gaussian(dimension, seed=0):
    return np.random.default_rng(seed).standard_normal(dimension).astype(np.float32)


@pytest.mark.parametrize(
    "ratio, dimension, expected",
    [(0.01, 1000, 10), (0.01, 1001, 11), (0.001, 10, 1), (1, 5, 5), (0.5, 1, 1), (1e-9, 7, 1)],
)
def test_the_count_of_a_ratio_is_rounded_up(ratio, dimension, expected):
    assert count(ratio, dimension) == expected


@both
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 1.0])
def test_fixed_sends_exactly_its_share(convert, ratio):
    x = convert(gaussian(3001))
    support = Fixed(ratio).support(backend_of(x), x, Control(step=17))
    assert len(support) == count(ratio, 3001)


@both
@pytest.mark.parametrize("steps, first, ratio", [(1, 0.25, 0.01), (7, 0.25, 0.01), (5, 1.0, 0.002)])
def test_warmup_narrows_geometrically_to_the_target(convert, steps, first, ratio):
    """T5, T77."""
    dimension = 4000
    x = convert(gaussian(dimension))
    policy = Warmup(Fixed(ratio), steps, first)
    sent = [len(policy.support(backend_of(x), x, Control(step=t))) for t in range(steps + 3)]
    expected = [count(first * (ratio / first) ** (t / steps), dimension) for t in range(steps)]
    assert sent[0] == count(first, dimension)
    assert np.abs(np.subtract(sent[:steps], expected)).max() <= 1  # two ways of writing one power
    assert sent[:steps] == policy.counts(dimension)
    assert sent[steps:] == [count(ratio, dimension)] * 3
    assert sent == sorted(sent, reverse=True)


@both
def test_warmup_hands_over_to_the_adaptive_policy(convert):
    """T29."""
    dimension = 4000
    x = convert(gaussian(dimension))
    b = backend_of(x)
    then = Adaptive(PayloadBits(1), first_ratio=0.05)
    policy = Warmup(then, 4, 0.5)
    control = Control(step=4, price=1e-2)
    assert policy.support(b, x, control).tolist() == then.support(b, x, control).tolist()
    early = [len(policy.support(b, x, Control(step=t, price=1e-2))) for t in range(4)]
    assert early[0] == 2000 and early == sorted(early, reverse=True) and early[-1] > 200


@both
@given(
    x=arrays(np.float32, st.integers(1, 200), elements=st.floats(-50, 50, width=32)),
    price=st.floats(1e-6, 1e3),
    latency=st.floats(0, 1e3),
)
@settings(max_examples=150, deadline=None)
def test_the_adaptive_support_is_what_improves_by_more_than_its_price(convert, x, price, latency):
    """Coordinate j is sent where x_j^2 >= price * marginal cost; the fixed cost has no part in it."""
    cost = Affine(PayloadBits(x.size), per_unit=0.5, fixed=latency)
    y = convert(x)
    b = backend_of(y)
    found = Adaptive(cost).support(b, y, Control(step=3, price=price)).tolist()
    gains = np.square(x.astype(np.float64))
    toll = price * cost.marginal()
    clear = np.abs(gains - toll) > 1e-5 * toll  # float32 decides on the edge
    expected = (gains > toll) & (gains > 0)
    if expected.any():
        assert [i for i in found if clear[i]] == np.flatnonzero(expected & clear).tolist()
    elif clear.all():
        largest = np.abs(x).max()
        assert found == np.flatnonzero((np.abs(x) == largest) & (x != 0)).tolist()


@both
def test_without_a_price_the_first_ratio_is_sent(convert):
    x = convert(gaussian(2000))
    b = backend_of(x)
    policy = Adaptive(LinkTime(PayloadBits(1), bandwidth=1e9), first_ratio=0.02)
    assert len(policy.support(b, x, Control())) == 40


@both
@pytest.mark.parametrize("price", [1e-4, 1e-2, 0.1, 1.0])
def test_the_sign_family_maximises_improvement_less_price(convert, price):
    dimension = 3000
    assert dimension <= SAMPLE  # so the rule is exact
    plain = gaussian(dimension)
    x = convert(plain)
    b = backend_of(x)
    cost = SignPayloadBits(dimension)
    found = Adaptive(cost, family="sign").support(b, x, Control(step=1, price=price)).tolist()
    magnitudes = np.sort(np.abs(plain.astype(np.float64)))[::-1]
    counts = np.arange(1, dimension + 1)
    profit = np.cumsum(magnitudes) ** 2 / counts - price * cost.marginal() * counts
    assert profit[len(found) - 1] >= profit.max() - 1e-5 * abs(profit).max()
    order = np.argsort(-np.abs(plain), kind="stable")
    assert found == sorted(order[: len(found)].tolist())


def test_shared_random_depends_on_the_step_alone():
    x, y = gaussian(500, 1), gaussian(500, 2)
    b = backend_of(x)
    policy = SharedRandom(0.1, seed=3)
    one = policy.support(b, x, Control(step=5)).tolist()
    assert one == policy.support(b, y, Control(step=5, price=9.0)).tolist()
    assert one != policy.support(b, x, Control(step=6)).tolist()
    assert len(one) == 50


def test_only_a_full_fixed_share_sends_all():
    assert sends_all(Fixed(1.0))
    assert not sends_all(Fixed(0.5))
    assert not sends_all(Warmup(Fixed(1.0), 3))


@pytest.mark.parametrize(
    "make, setting",
    [
        (lambda: Fixed(0), "ratio"),
        (lambda: Fixed(1.5), "ratio"),
        (lambda: Fixed(float("nan")), "ratio"),
        (lambda: Fixed(True), "ratio"),
        (lambda: Fixed(0.1, exact="no"), "exact"),
        (lambda: SharedRandom(-1), "ratio"),
        (lambda: SharedRandom(0.1, seed=-1), "seed"),
        (lambda: SharedRandom(0.1, seed=2**31), "seed"),
        (lambda: SharedRandom(0.1, seed=1.0), "seed"),
        (lambda: Warmup(Fixed(0.1), 0), "warmup_steps"),
        (lambda: Warmup(Fixed(0.1), 2.5), "warmup_steps"),
        (lambda: Warmup(Fixed(0.1), 5, 0), "warmup_ratio"),
        (lambda: Adaptive(PayloadBits(1), first_ratio=0), "first_ratio"),
        (lambda: Adaptive(1e9), "cost"),
        (lambda: Adaptive(PayloadBits(1), family="topk"), "family"),
    ],
)
def test_a_bad_setting_is_named(make, setting):
    with pytest.raises(ConfigurationError, match=rf"^{setting} must"):
        make()
