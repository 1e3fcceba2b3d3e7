"""One price for many tensors and workers reaches what the rule reaches on all of them at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.core import efficiency
from hvd_adaptive.core.cost import Affine, LinkTime, Packets, PayloadBits, SignPayloadBits
from hvd_adaptive.core.ensemble import Ensemble
from hvd_adaptive.core.numpy_backend import NUMPY
from hvd_adaptive.core.price import (
    EARLY,
    ELASTICITY,
    GREATEST_CHANGE,
    GREATEST_TIME,
    LEAST_RATIO,
    RATIO,
    next_price,
    paced_price,
)
from hvd_adaptive.core.recipe import adaptive, restate

pytestmark = pytest.mark.filterwarnings("ignore:memory=")

LAYERS = {"conv": 600, "embedding": 5000, "head": 2500, "bias": 40}


def after(price, improvement, cost):
    return float(next_price(NUMPY, *map(np.float64, (price, improvement, cost))))


def gradients(count, seed=0, dimensions=LAYERS, tail=1.0):
    """Static gradients of workers and layers of very different scales and tails."""
    rng = np.random.default_rng(seed)
    return [
        [
            (
                rng.standard_normal(d) * np.exp(tail * rng.standard_normal(d)) * 10.0 ** rng.uniform(-2, 1)
            ).astype(np.float32)
            for d in dimensions.values()
        ]
        for _ in range(count)
    ]


def run(recipe, workers, steps=15, dimensions=LAYERS):
    """What an ensemble ends up sending of static gradients: T of each tensor of each worker."""
    ensemble = Ensemble(NUMPY, recipe, dimensions, len(workers))
    for _ in range(steps):
        ensemble.reduce(workers)
    reports = [worker.statistics() for worker in ensemble.workers]
    assert len({report.price for report in reports}) == 1
    return [list(report.sparsity.values()) for report in reports], reports[0]


def efficiency_of(counts, workers, cost, family="sparsify"):
    """Improvement per cost of sending the largest ``counts`` of each tensor, in float64, by the
    definition: fixed once for each worker, heads and marginals of each tensor."""
    improvement = spent = 0.0
    for own, tensors in zip(counts, workers, strict=True):
        spent += cost.fixed
        for count, x in zip(own, tensors, strict=True):
            largest = np.sort(np.abs(x.astype(np.float64)))[::-1][:count]
            improvement += np.square(largest).sum() if family == "sparsify" else largest.sum() ** 2 / count
            one = cost.for_dimension(x.size)
            spent += one.head + count * one.marginal()
    return improvement / spent


def best_of_all(workers, cost):
    """The optimum over every choice of counts: gains per marginal cost, in descending order."""
    gains, costs = [], []
    for tensors in workers:
        for x in tensors:
            gains.append(np.square(x.astype(np.float64)))
            costs.append(np.full(x.size, cost.for_dimension(x.size).marginal()))
    gains, costs = np.concatenate(gains), np.concatenate(costs)
    order = np.argsort(-gains / costs)
    return (np.cumsum(gains[order]) / (cost.fixed * len(workers) + np.cumsum(costs[order]))).max()


COSTS = {
    "affine": Affine(PayloadBits(1), per_unit=1.0, fixed=1e5),
    "affine, little fixed": Affine(PayloadBits(1), per_unit=1.0, fixed=2e4),
    "link": LinkTime(PayloadBits(1), bandwidth=1e8, latency=1e-5, compute=1e-3),
    "packets": Packets(PayloadBits(1), packet_bytes=64, header_bytes=20, message_bytes=20000),
}


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("tail", [0.5, 1.5])
def test_it_is_within_two_percent_of_the_rule_on_the_concatenated_gradient(cost, workers, tail):
    static = gradients(workers, tail=tail)
    recipe = adaptive(cost=cost, objective="energy", memory="none", dense_below=0)
    counts, _ = run(recipe, static)
    cost = restate(recipe, 1, workers).adaptive.cost  # a link's time grows with the world size
    reached = efficiency_of(counts, static, cost)
    assert reached >= 0.98 * best_of_all(static, cost)
    assert reached <= 1.000001 * best_of_all(static, cost)  # or one of the two is wrong
    # The rule knows one message of one worker, whose indices are longer.
    whole = np.concatenate([x for tensors in static for x in tensors])
    if workers == 1:
        affine = Affine(PayloadBits(whole.size), per_unit=cost.marginal() / 32.0, fixed=cost.fixed)
        rule = efficiency.best(whole, affine)
        assert reached >= 0.98 * rule.efficiency * np.square(whole.astype(np.float64)).sum()


@given(st.integers(0, 10**6), st.floats(0.1, 2.5), st.floats(10, 1e5))
@settings(max_examples=60, deadline=None)
def test_one_tensor_without_memory_gets_the_t_of_the_paper(seed, tail, fixed):
    """Deterministic gradient, one worker, one tensor: T is that of the rule, but for the price's
    eight significant bits."""
    (static,) = gradients(1, seed, {"x": 1500}, tail)
    cost = Affine(PayloadBits(1500), per_unit=1.0, fixed=fixed)
    counts, _ = run(adaptive(cost=cost, memory="none", dense_below=0), [static], 25, {"x": 1500})
    best = efficiency.best(static[0], cost)
    reached = efficiency.at(static[0], cost, counts[0][0])
    assert reached.efficiency >= (1 - 2**-8) * best.efficiency


def test_every_tensor_sends_something_however_small():
    """So none starves without memory, and the price cannot stand above everything for good."""
    static = gradients(2)
    for own in static:
        own[2] *= np.float32(1e-6)
        own[3] *= np.float32(0)
    counts, _ = run(adaptive(cost=COSTS["affine"], memory="none", dense_below=0), static)
    assert [own[2] for own in counts] == [1, 1]
    assert [own[3] for own in counts] == [0, 0]


def test_the_sign_family_reaches_its_best_t_too():
    (static,) = gradients(1, 3, {"x": 4000}, 0.3)
    cost = Affine(SignPayloadBits(4000), per_unit=1.0, fixed=2000.0)
    recipe = adaptive(cost=cost, family="sign", memory="none", dense_below=0)
    counts, _ = run(recipe, [static], 25, {"x": 4000})
    best = efficiency.best(static[0], cost, "sign")
    assert efficiency.at(static[0], cost, counts[0][0], "sign").efficiency >= 0.98 * best.efficiency


@pytest.mark.parametrize("workers", [1, 3])
def test_the_report_says_what_was_reached(workers):
    """Improvement and price of ``statistics()`` against the definition."""
    static, cost = gradients(workers), COSTS["affine"]
    counts, report = run(adaptive(cost=cost, memory="none", dense_below=0), static)
    reached = efficiency_of(counts, static, cost)
    assert report.price == pytest.approx(reached, rel=2**-8)
    squares = [
        np.sort(np.square(x.astype(np.float64)))[::-1][:count].sum()
        for own, tensors in zip(counts, static, strict=True)
        for count, x in zip(own, tensors, strict=True)
    ]
    assert report.improvement == pytest.approx(sum(squares) / workers, rel=1e-4)


def test_the_price_follows_gradients_that_shrink():
    """Improvement is quadratic in the gradient, so a tenth of it has a hundredth of the price."""
    static, cost = gradients(2), COSTS["link"]
    ensemble = Ensemble(
        NUMPY, adaptive(cost=cost, objective="energy", memory="none", dense_below=0), LAYERS, 2
    )
    prices = []
    for scale in [1.0] * 12 + [0.1] * 12:
        ensemble.reduce([[x * np.float32(scale) for x in own] for own in static])
        prices.append(ensemble.workers[0].statistics().price)
    assert prices[-1] == pytest.approx(prices[11] / 100, rel=0.02)
    changes = np.divide(prices[2:], prices[1:-1])
    assert changes.min() >= 1 / GREATEST_CHANGE * (1 - 2**-7)


@given(st.floats(1e-20, 1e20), st.floats(1e-20, 1e20), st.floats(1e-15, 1e15))
@settings(max_examples=200, deadline=None)
def test_a_step_changes_the_price_by_a_bounded_factor(price, improvement, cost):
    found = after(price, improvement, cost)
    wanted = min(max(improvement / cost, price / GREATEST_CHANGE), price * GREATEST_CHANGE)
    assert found == pytest.approx(wanted, rel=2**-8)
    mantissa, _ = np.frexp(found)
    assert mantissa * 2**8 == round(mantissa * 2**8)


def test_the_first_price_is_taken_as_it_is():
    assert after(0.0, 3.0, 2.0) == 1.5
    assert after(0.0, 1e12, 1.0) == pytest.approx(1e12, rel=2**-8)


@pytest.mark.parametrize(
    "improvement, cost", [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (float("inf"), 1.0), (-1.0, 1.0)]
)
@pytest.mark.parametrize("price", [0.0, 0.75])
def test_a_step_that_tells_nothing_leaves_the_price(price, improvement, cost):
    assert after(price, improvement, cost) == price


def paced(price, step, fixed, variable, share=None):
    numbers = map(np.float64, (price, step, fixed, variable))
    return float(paced_price(NUMPY, *numbers, share))


def settled(of_all, fixed=1.0, share=None, step=10**6):
    """The price that is reached where sending all coordinates costs ``of_all``."""
    price = 100.0
    for _ in range(60):
        price = paced(price, step, fixed, of_all / price, share)
    return price


@given(st.floats(-3, 9), st.floats(-3, 3))
@settings(max_examples=200, deadline=None)
def test_the_pace_is_where_time_is_least(cost, fixed):
    """Steps exp(e(q)), with the elasticity e(q) = E R / q, times the time of a step of cost C q:
    the minimum over a fine grid of q, against the price that is reached."""
    fixed, of_all = 10.0**fixed, 10.0 ** (cost + fixed)
    q = 1 / settled(of_all, fixed)
    grid = np.geomspace(1e-5, 1, 20001)
    time = ELASTICITY * RATIO / grid + of_all / fixed * grid  # in logarithms, near 0
    best = grid[np.argmin(time)]
    capped = min(best, GREATEST_TIME * fixed / of_all)
    if capped > 10 * LEAST_RATIO:
        assert q == pytest.approx(capped, rel=0.02)


@given(st.floats(0.01, 0.9), st.floats(-1, 4))
@settings(max_examples=100, deadline=None)
def test_a_given_share_is_held(share, cost):
    q = 1 / settled(10.0**cost, share=share)
    assert q == 1 or 10.0**cost * q == pytest.approx(share / (1 - share), rel=0.01)


def test_the_pace_is_greater_early():
    early, late = (paced(100.0, step, 1.0, 0.05) for step in (1, 10**6))
    assert late / early == pytest.approx((1 + EARLY) ** 0.5, rel=0.02)


@pytest.mark.parametrize("share", [None, 0.1])
def test_the_pace_stays_within_bounds_and_comes_back(share):
    """Where the least that can be sent is beyond the budget, and where all can be sent."""
    price, most = 100.0, 1.0 if share is None else 1 / LEAST_RATIO
    for _ in range(60):  # headers alone cost as much as all the rest
        price = paced(price, 50, 1.0, 100.0, share)
    assert most * (1 - 2**-7) <= price <= 1 / LEAST_RATIO * (1 + 2**-7)
    steps = 0
    while price > 200:
        before, price = price, paced(price, 50, 1.0, 1e-2 / price, share)
        assert price >= before / GREATEST_CHANGE * (1 - 2**-7)
        steps += 1
    assert steps < 10
    for _ in range(60):
        price = paced(price, 50, 1.0, 1e-9 / price, share)
    assert price == 1


@pytest.mark.parametrize(
    "fixed, variable", [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, float("inf"))]
)
def test_costs_that_tell_nothing_leave_the_pace(fixed, variable):
    assert paced(64.0, 5, fixed, variable) == 64.0


def test_the_pace_does_not_depend_on_the_unit_of_gradients_and_is_steady():
    """T of a training with noise, at one rank after the other: no jumps."""
    rng, cost = np.random.default_rng(0), LinkTime(PayloadBits(1), bandwidth=3e7, compute=1e-3)
    small, large = (Ensemble(NUMPY, adaptive(cost=cost, dense_below=0), LAYERS, 2) for _ in range(2))
    sent = []
    for _ in range(40):
        step = [[rng.standard_t(3, d).astype(np.float32) for d in LAYERS.values()] for _ in range(2)]
        small.reduce(step)
        large.reduce([[x * np.float32(2**20) for x in own] for own in step])
        report = small.workers[0].statistics()
        assert report.sparsity == large.workers[0].statistics().sparsity
        sent.append(sum(report.sparsity.values()))
    assert max(sent[10:]) < 1.5 * min(sent[10:])


def test_rounding_of_a_sum_does_not_move_the_price():
    """Ballots are summed in different orders from run to run."""
    rng = np.random.default_rng(1)
    values = rng.random(100).astype(np.float32)
    sums = {float(np.float32(np.sum(rng.permutation(values), dtype=np.float32))) for _ in range(50)}
    prices = {after(1.0, total, 30.0) for total in sums}
    assert len(prices) == 1
