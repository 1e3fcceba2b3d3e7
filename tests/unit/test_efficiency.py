"""The tuning rule against brute force over every T."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_adaptive.core.cost import Affine, LinkTime, Packets, PayloadBits, SignPayloadBits
from hvd_adaptive.core.efficiency import at, best, curve, dynamic_sign_sparsity, probabilities
from hvd_adaptive.core.errors import ConfigurationError

FAMILIES = ["sparsify", "sign", "stochastic"]


def _spike(parts):
    length, place, height = parts
    gradient = np.full(length, 1e-3)
    gradient[place % length] = height
    return gradient


GRADIENTS = st.one_of(
    arrays(np.int64, st.integers(1, 40), elements=st.integers(-3, 3)).map(lambda g: g.astype(float)),
    arrays(np.float64, st.integers(1, 40), elements=st.floats(-1, 1, width=32)),
    arrays(np.float64, st.integers(1, 40), elements=st.floats(-25, 25)).map(lambda g: np.exp(g) * np.sign(g)),
    st.tuples(st.integers(1, 40), st.integers(0, 39), st.sampled_from([1e-3, 0.1, 1.0, 1e8])).map(_spike),
    st.integers(1, 40).map(lambda length: np.full(length, 0.1)),
    st.just(np.concatenate(([1.0], np.full(60, 0.3)))),  # beta / cost has two peaks
)
PAYLOADS = st.sampled_from(
    [lambda d: PayloadBits(d), lambda d: PayloadBits(d, 1.58), lambda d: SignPayloadBits(d)]
)
MODELS = st.one_of(
    st.just(lambda p: p),
    st.tuples(st.floats(0, 10), st.floats(0, 1e4))
    .filter(lambda c: sum(c) > 1e-6)
    .map(lambda c: lambda p: Affine(p, *c)),
    st.sampled_from([1, 4, 9, 32, 512]).map(lambda size: lambda p: Packets(p, size, 8, 8)),
    st.sampled_from([0.0, 1e-7, 1e-5]).map(lambda t: lambda p: LinkTime(p, 1e9, t, t, 4)),
)
COSTS = st.builds(lambda payload, model: lambda d: model(payload(d)), PAYLOADS, MODELS)


class Concave(PayloadBits):
    """A payload whose coordinates get cheaper, as they do under Elias-Fano."""

    affine = False

    def _cost(self, counts):
        return 40 * np.sqrt(counts)

    def marginal(self, sparsity=1.0):
        return 20 / math.sqrt(sparsity)


def improvement_by_definition(gradient, sparsity, family):
    if family == "stochastic":
        return float(omega_by_definition(gradient, np.array([sparsity]))[0])
    ordered = sorted((abs(float(g)) for g in gradient), reverse=True)
    total = math.fsum(g * g for g in ordered)
    if total == 0:
        return 0.0
    sent = ordered[: int(sparsity)]
    if family == "sparsify":
        return math.fsum(g * g for g in sent) / total
    return math.fsum(sent) ** 2 / (sparsity * total)


def omega_by_definition(gradient, counts):
    """Water-filling by bisection on the logarithm of the level, to the last float."""
    magnitudes = np.abs(gradient[gradient != 0])
    if not magnitudes.size:
        return np.zeros(len(counts))
    low = np.full(len(counts), -math.log(magnitudes.max()) - 10)  # exp(-10) times d fills less than 1
    high = np.full(len(counts), -math.log(magnitudes.min()))
    for _ in range(60):
        middle = (low + high) / 2
        filled = np.minimum(1, np.exp(middle)[:, None] * magnitudes).sum(1)
        low, high = np.where(filled < counts, middle, low), np.where(filled < counts, high, middle)
    p = np.minimum(1, np.exp(high)[:, None] * magnitudes)
    return (magnitudes**2).sum() / (magnitudes**2 / p).sum(1)


def brute(gradient, cost, family):
    if family == "stochastic":
        grid = np.linspace(1, len(gradient), 12 * len(gradient))
        if isinstance(cost, Packets):
            grid = np.union1d(grid, np.maximum(cost.full(), 1))
        return grid, omega_by_definition(gradient, grid) / cost(grid)
    grid = np.arange(1, len(gradient) + 1)
    return grid, np.array([improvement_by_definition(gradient, t, family) / cost(int(t)) for t in grid])


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(gradient=GRADIENTS, make=COSTS)
def test_best_is_the_best_of_all(family, gradient, make):
    cost = make(gradient.size)
    found = best(gradient, cost, family)
    grid, efficiency = brute(gradient, cost, family)
    assert 1 <= found.sparsity <= gradient.size
    assert found.efficiency >= efficiency.max() * (1 - 1e-9)
    # ... and is no boast: the definition gives the same at that T.
    expected = improvement_by_definition(gradient, found.sparsity, family)
    assert found.improvement == pytest.approx(expected, rel=1e-9)
    assert found.cost == cost(found.sparsity)
    assert found.efficiency == pytest.approx(expected / found.cost, rel=1e-9)
    if family != "stochastic":
        assert isinstance(found.sparsity, int)
        assert found.sparsity <= max(1, np.count_nonzero(gradient))
        rivals = efficiency >= efficiency.max() * (1 - 1e-9)
        if rivals.sum() == 1:
            assert found.sparsity == grid[rivals][0]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(gradient=GRADIENTS)
def test_best_over_a_payload_that_is_not_affine(family, gradient):
    payload = Concave(gradient.size)
    for cost in (payload, Affine(payload, 1.0, 100.0), Packets(payload, 4)):
        found = best(gradient, cost, family)
        whole = curve(gradient, cost, family)
        assert found.efficiency >= whole.efficiency.max() * (1 - 1e-12)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(gradient=GRADIENTS, make=COSTS)
def test_curve_follows_the_definitions(family, gradient, make):
    cost = make(gradient.size)
    whole = curve(gradient, cost, family)
    assert whole.sparsity.tolist() == list(range(1, gradient.size + 1))
    expected = np.array([improvement_by_definition(gradient, t, family) for t in whole.sparsity])
    np.testing.assert_allclose(whole.improvement, expected, rtol=1e-9)
    np.testing.assert_array_equal(whole.cost, cost(whole.sparsity))
    np.testing.assert_array_equal(whole.efficiency, whole.improvement / whole.cost)
    if family == "sparsify":
        assert (whole.step_scale == 1).all()
    elif family == "sign":
        np.testing.assert_allclose(whole.step_scale, np.sqrt(expected / whole.sparsity), rtol=1e-9)
    else:
        np.testing.assert_allclose(whole.step_scale, expected, rtol=1e-9)
    assert at(gradient, cost, gradient.size, family) == whole[-1]


@settings(max_examples=150, deadline=None)
@given(gradient=GRADIENTS, data=st.data())
def test_improvement_is_ordered_and_bounded(gradient, data):
    cost = PayloadBits(gradient.size)
    s, sq, ss = (curve(gradient, cost, family) for family in FAMILIES)
    if not gradient.any():
        assert not s.improvement.any() and not sq.improvement.any() and not ss.improvement.any()
        return
    share = s.sparsity / gradient.size
    tolerance = 1e-9
    assert (share <= ss.improvement * (1 + tolerance)).all()  # T/d <= omega <= alpha
    assert (ss.improvement <= s.improvement * (1 + tolerance)).all()
    assert (sq.improvement <= s.improvement * (1 + tolerance)).all()  # beta <= alpha
    assert (sq.improvement * gradient.size * (1 + tolerance) >= 1).all()  # beta >= 1/d
    for concave in (s, ss):
        assert (np.diff(concave.improvement) >= -tolerance).all()
        assert (np.diff(concave.improvement, 2) <= tolerance).all()
        assert concave.improvement[-1] == pytest.approx(1)
    # No feasible probabilities do better than the water-filled ones.
    count = data.draw(st.integers(1, gradient.size))
    p = np.array(data.draw(st.lists(st.floats(1e-3, 1), min_size=gradient.size, max_size=gradient.size)))
    p *= min(count / p.sum(), 1 / p.max())
    variance = math.fsum(gradient**2 / p)
    assert np.sum(gradient**2) / variance <= ss.improvement[count - 1] * (1 + tolerance)


@settings(max_examples=150, deadline=None)
@given(gradient=GRADIENTS, share=st.floats(0, 1))
def test_probabilities_fill_the_water(gradient, share):
    count = 1 + share * (gradient.size - 1)
    p = probabilities(gradient, count)
    assert p.shape == gradient.shape
    assert (p >= 0).all() and (p <= 1).all()
    present = np.abs(gradient) / np.abs(gradient).max(initial=0) > 0 if gradient.any() else gradient != 0
    assert not p[~present].any()
    assert p.sum() == pytest.approx(min(count, np.count_nonzero(present)), rel=1e-9)
    below = present & (p < 1)
    if below.any():  # proportional to magnitude, and the saturated ones are the larger
        level = p[below] / np.abs(gradient[below])
        np.testing.assert_allclose(level, level[0], rtol=1e-6)
        assert np.abs(gradient[below]).max() <= np.abs(gradient[p == 1]).min(initial=np.inf) * (1 + 1e-9)
    if present.any():
        omega = at(gradient, PayloadBits(gradient.size), count, "stochastic").improvement
        variance = math.fsum(gradient[present] ** 2 / p[present])
        assert np.sum(gradient**2) / variance == pytest.approx(omega, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(gradient=GRADIENTS)
def test_dynamic_sign_rule(gradient):
    count = dynamic_sign_sparsity(gradient)
    ordered = np.sort(np.abs(gradient))[::-1]
    norm = math.sqrt(math.fsum(gradient**2))
    assert ordered[:count].sum() >= norm * (1 - 1e-12)
    assert count == 1 or ordered[: count - 1].sum() <= norm * (1 + 1e-12)
    assert count <= math.ceil(math.sqrt(gradient.size)) or ordered[: count - 1].sum() >= norm * (1 - 1e-12)
    if gradient.any():
        beta = at(gradient, SignPayloadBits(gradient.size), count, "sign").improvement
        assert beta >= (1 - 1e-9) / count


def test_payload_only_degenerates_as_the_theory_says():
    generator = np.random.default_rng(0)
    for _ in range(50):
        gradient = generator.standard_t(2, size=200)
        assert best(gradient, PayloadBits(200)).sparsity == 1
        saturation = np.abs(gradient).sum() / np.abs(gradient).max()
        assert best(gradient, PayloadBits(200), "stochastic").sparsity == pytest.approx(saturation)


def test_stochastic_optimum_lies_between_the_breakpoints():
    # omega has a continuous derivative, so the best T is in general not where a p_j reaches 1.
    gradient = np.array([8.0, 4.0, 2.0, 1.0])
    cost = Affine(PayloadBits(4), 1.0, 40.0)
    edges = [15 / 8, 1 + 7 / 4, 2 + 3 / 2, 4.0]
    found = best(gradient, cost, "stochastic")
    assert found.efficiency > 1.001 * max(at(gradient, cost, t, "stochastic").efficiency for t in edges)


@pytest.mark.parametrize("family", FAMILIES)
def test_where_sending_costs_nothing_more_all_is_sent(family):
    gradient = np.array([3.0, 0.0, -2.0, 1.0, 0.0])
    for cost in (Affine(PayloadBits(5), 0.0, 1.0), LinkTime(PayloadBits(5), 1e9, compute=1.0, world_size=1)):
        found = best(gradient, cost, family)
        assert found.improvement == pytest.approx(curve(gradient, cost, family).improvement.max())
        assert family == "sign" or found.sparsity == 3


def test_packets_are_filled():
    gradient = np.random.default_rng(1).normal(size=300)
    cost = Packets(PayloadBits(300))
    assert best(gradient, cost).sparsity in (99, 199, 299, 300)
    found = best(gradient, cost, "stochastic").sparsity
    assert found in cost.full()


@pytest.mark.parametrize("family", FAMILIES)
def test_zero_gradient(family):
    """T78."""
    for cost in (PayloadBits(5), Affine(PayloadBits(5), 1, 9), Packets(PayloadBits(5))):
        found = best(np.zeros((5, 1)), cost, family)
        assert (found.sparsity, found.improvement, found.efficiency) == (1, 0, 0)
        assert math.isfinite(found.step_scale)
    assert not probabilities(np.zeros(5), 2).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_extreme_scales(family):
    cost = Affine(PayloadBits(6), 1, 100)
    gradient = np.array([3.0, -2.0, 1.0, 0.5, 0.25, 0.0])
    expected = best(gradient, cost, family)
    for scale in (1e-300, 1e-150, 1e150, 1e300):
        found = best(gradient * scale, cost, family)
        assert found.sparsity == pytest.approx(expected.sparsity)
        assert found.improvement == pytest.approx(expected.improvement)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors_of_any_shape(dtype):
    torch = pytest.importorskip("torch")
    gradient = torch.linspace(-1, 2, 24).to(getattr(torch, dtype)).reshape(2, 3, 4).requires_grad_()
    cost = Packets(PayloadBits(24), 32)
    for family in FAMILIES:
        assert best(gradient, cost, family) == best(gradient.detach().double().numpy(), cost, family)
    assert probabilities(gradient, 3).shape == (2, 3, 4)


def test_tensorflow_tensors():
    tf = pytest.importorskip("tensorflow")
    gradient = np.linspace(-1, 2, 24, dtype=np.float32).reshape(4, 6)
    cost = Packets(PayloadBits(24), 32)
    for family in FAMILIES:
        assert best(tf.constant(gradient), cost, family) == best(gradient, cost, family)
        half = tf.cast(gradient, tf.bfloat16)
        assert best(half, cost, family) == best(tf.cast(half, tf.float64), cost, family)
    with pytest.raises(ConfigurationError, match="eager"):
        tf.function(lambda x: best(x, cost).improvement, autograph=False)(tf.constant(gradient))


@pytest.mark.parametrize(
    "message, gradient, cost, family",
    [
        ("family", np.ones(3), PayloadBits(3), "signs"),
        ("cost must be a cost model", np.ones(3), 7.0, "sign"),
        ("cost must be a cost model", np.ones(3), lambda t: t, "sign"),
        ("dimension 4.*3 elements.*for_dimension\\(3\\)", np.ones(3), PayloadBits(4), "sign"),
        ("2 elements that are NaN", np.array([1, np.nan, np.inf]), PayloadBits(3), "sparsify"),
        ("no elements", np.ones(0), PayloadBits(1), "sparsify"),
        ("real numbers", np.ones(3, complex), PayloadBits(3), "sparsify"),
        ("real numbers", ["a", "b"], PayloadBits(2), "sparsify"),
    ],
)
def test_wrong_arguments_are_named(message, gradient, cost, family):
    with pytest.raises(ConfigurationError, match=message):
        best(gradient, cost, family)


@pytest.mark.parametrize("sparsity", [0, 0.5, 4, math.nan, -1])
def test_sparsity_out_of_range(sparsity):
    with pytest.raises(ConfigurationError, match="sparsity"):
        probabilities(np.ones(3), sparsity)
    with pytest.raises(ConfigurationError, match="sparsity"):
        at(np.ones(3), PayloadBits(3), sparsity)


def test_a_fractional_count_is_for_the_stochastic_family_alone():
    assert at(np.ones(3), PayloadBits(3), 1.5, "stochastic").improvement == pytest.approx(0.5)
    with pytest.raises(ConfigurationError, match="whole"):
        at(np.ones(3), PayloadBits(3), 1.5)
