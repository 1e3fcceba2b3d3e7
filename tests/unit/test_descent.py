"""The guarantees behind the tuning rule, checked on real objectives.

Descent: a step ``x - step_scale / L * Q_T(g)`` lowers F by at least ``improvement / (2 L) |g|^2``.
Rates: what follows for a run of steps whose T the rule chooses.  Source: the CAT paper
(arXiv 2003.06377), its descent lemmas and convergence table.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.core.cost import Affine, Packets, PayloadBits, SignPayloadBits
from hvd_adaptive.core.efficiency import at, best, compressed, dynamic_sign_sparsity, probabilities
from hvd_adaptive.core.errors import ConfigurationError

SLACK = 1e-9
DETERMINISTIC = ["sparsify", "sign"]
FAMILIES = [*DETERMINISTIC, "stochastic"]
COSTS = st.sampled_from(
    [
        lambda d: PayloadBits(d),
        lambda d: SignPayloadBits(d),
        lambda d: Affine(PayloadBits(d), 1.0, 100.0),
        lambda d: Packets(PayloadBits(d), 16),
    ]
)


class Quadratic:
    """x'Hx / 2, whose expectation under independent sampling is known in closed form."""

    def __init__(self, generator, dimension):
        basis = np.linalg.qr(generator.normal(size=(dimension, dimension)))[0]
        spectrum = 10.0 ** generator.uniform(-2, 1, dimension)
        self.hessian = basis @ np.diag(spectrum) @ basis.T
        self.smoothness, self.strong = spectrum.max(), spectrum.min()
        self.minimum = 0.0
        self.minimiser = np.zeros(dimension)

    def __call__(self, x):
        return 0.5 * x @ self.hessian @ x

    def gradient(self, x):
        return self.hessian @ x

    def expected(self, x, mean, variances):
        """E F(x - v) for v of that mean, with independent coordinates of those variances."""
        return self(x - mean) + 0.5 * np.diag(self.hessian) @ variances


class Logistic:
    """Mean logistic loss plus an l2 term."""

    def __init__(self, generator, dimension, l2=0.05):
        self.rows = generator.normal(size=(20, dimension)) * 10.0 ** generator.uniform(-1, 0.5, dimension)
        self.l2 = l2
        self.smoothness = np.linalg.norm(self.rows, 2) ** 2 / (4 * len(self.rows)) + l2
        self.strong = l2
        x = np.zeros(dimension)
        for _ in range(200):  # Newton, damped by the bound
            s = 1 / (1 + np.exp(self.rows @ x))
            hessian = (self.rows.T * (s * (1 - s))) @ self.rows / len(self.rows) + l2 * np.eye(dimension)
            step = np.linalg.solve(hessian, self.gradient(x))
            x = x - step / max(1.0, np.linalg.norm(step))
        self.minimiser, self.minimum = x, self(x)

    def __call__(self, x):
        return np.mean(np.logaddexp(0, -self.rows @ x)) + 0.5 * self.l2 * x @ x

    def gradient(self, x):
        return -self.rows.T @ (1 / (1 + np.exp(self.rows @ x))) / len(self.rows) + self.l2 * x


class Wavy:
    """Sum of 1 - cos(a'x): smooth, not convex, least value 0."""

    def __init__(self, generator, dimension):
        self.rows = generator.normal(size=(8, dimension))
        self.smoothness = np.linalg.norm(self.rows, 2) ** 2
        self.minimum = 0.0

    def __call__(self, x):
        return np.sum(1 - np.cos(self.rows @ x))

    def gradient(self, x):
        return self.rows.T @ np.sin(self.rows @ x)


PROBLEMS = st.sampled_from([Quadratic, Logistic, Wavy])
SEEDS = st.integers(0, 10**6)


def start(kind, seed, dimension):
    generator = np.random.default_rng(seed)
    problem = kind(generator, dimension)
    return problem, generator.standard_t(2, size=dimension), generator


@pytest.mark.parametrize("family", DETERMINISTIC)
@settings(max_examples=150, deadline=None)
@given(kind=PROBLEMS, seed=SEEDS, dimension=st.integers(1, 12))
def test_descent_of_a_step_at_every_sparsity(family, kind, seed, dimension):
    problem, x, _ = start(kind, seed, dimension)
    g = problem.gradient(x)
    for sparsity in range(1, dimension + 1):
        choice = at(g, PayloadBits(dimension), sparsity, family)
        moved = x - choice.step_scale / problem.smoothness * compressed(g, sparsity, family)
        promised = choice.improvement / (2 * problem.smoothness) * (g @ g)
        assert problem(moved) <= problem(x) - promised + SLACK * (1 + problem(x))


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, dimension=st.integers(1, 12), share=st.floats(0, 1))
def test_expected_descent_of_a_stochastic_step_on_quadratics(seed, dimension, share):
    problem, x, _ = start(Quadratic, seed, dimension)
    g = problem.gradient(x)
    count = 1 + share * (dimension - 1)
    choice = at(g, PayloadBits(dimension), count, "stochastic")
    p = probabilities(g, count)
    step = choice.step_scale / problem.smoothness
    after = problem.expected(x, step * g, step**2 * g**2 * (1 / p - 1))
    assert after <= problem(x) - choice.improvement / (2 * problem.smoothness) * (g @ g) + SLACK * (
        1 + problem(x)
    )


@settings(max_examples=40, deadline=None)
@given(kind=PROBLEMS, seed=SEEDS, dimension=st.integers(1, 6), share=st.floats(0, 1))
def test_expected_descent_of_a_stochastic_step_by_all_outcomes(kind, seed, dimension, share):
    problem, x, _ = start(kind, seed, dimension)
    g = problem.gradient(x)
    count = 1 + share * (dimension - 1)
    choice = at(g, PayloadBits(dimension), count, "stochastic")
    p = probabilities(g, count)
    after = 0.0
    for outcome in itertools.product((0, 1), repeat=dimension):
        kept = np.array(outcome)
        chance = np.prod(np.where(kept, p, 1 - p))
        after += chance * problem(
            x - choice.step_scale / problem.smoothness * kept * g / np.where(p > 0, p, 1)
        )
    assert after <= problem(x) - choice.improvement / (2 * problem.smoothness) * (g @ g) + SLACK * (
        1 + problem(x)
    )


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, dimension=st.integers(1, 20), data=st.data())
def test_the_bound_is_met_and_the_step_is_the_best_one_on_a_sphere(seed, dimension, data):
    x = np.random.default_rng(seed).normal(size=dimension)
    sparsity = data.draw(st.integers(1, dimension))
    for family in DETERMINISTIC:
        choice = at(x, PayloadBits(dimension), sparsity, family)
        sent = compressed(x, sparsity, family)

        def after(scale, sent=sent):
            return 0.5 * np.sum((x - scale * sent) ** 2)

        left = 0.5 * (1 - choice.improvement) * (x @ x)
        assert after(choice.step_scale) == pytest.approx(left, rel=1e-9, abs=1e-12)
        assert after(choice.step_scale) <= min(after(0.9 * choice.step_scale), after(1.1 * choice.step_scale))


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, dimension=st.integers(1, 30), share=st.floats(0, 1))
def test_sampling_is_unbiased_and_of_the_stated_variance(seed, dimension, share):
    generator = np.random.default_rng(seed)
    g = generator.standard_t(3, size=dimension)
    count = 1 + share * (dimension - 1)
    p = probabilities(g, count)
    draws = np.array([compressed(g, count, "stochastic", generator) for _ in range(400)])
    deviation = np.sqrt(g**2 * (1 / p - 1) / len(draws))
    assert (np.abs(draws.mean(0) - g) <= 6 * deviation + 1e-12).all()
    kept = (draws != 0).sum(1).mean()
    assert abs(kept - count) <= 6 * math.sqrt(np.sum(p * (1 - p)) / len(draws)) + 1e-9


def tuned_run(problem, x, make_cost, family, generator, steps):
    """Iterates, gradients and improvements of a run whose T the rule chooses."""
    cost = make_cost(x.size)
    points, improvements = [x], []
    for _ in range(steps):
        g = problem.gradient(x)
        if not g.any():
            break
        choice = best(g, cost, family)
        x = x - choice.step_scale / problem.smoothness * compressed(g, choice.sparsity, family, generator)
        points.append(x)
        improvements.append(choice.improvement)
    return points, np.array(improvements)


@pytest.mark.parametrize("family", DETERMINISTIC)
@settings(max_examples=40, deadline=None)
@given(kind=PROBLEMS, seed=SEEDS, dimension=st.integers(2, 10), make=COSTS)
def test_rates_of_a_tuned_run(family, kind, seed, dimension, make):
    problem, x, generator = start(kind, seed, dimension)
    points, improvements = tuned_run(problem, x, make, family, generator, 40)
    gaps = np.array([problem(point) for point in points]) - problem.minimum
    smallest = min(np.sum(problem.gradient(point) ** 2) for point in points)
    tolerance = SLACK * (1 + gaps[0])
    # In the worst case the improvement is that of a uniform gradient.
    assert (improvements >= (1 - SLACK) / dimension).all()
    # Any smooth objective: (1 / mean improvement) 2 L (F0 - F*) / eps steps.
    assert smallest <= 2 * problem.smoothness * gaps[0] / improvements.sum() + tolerance
    if kind is Wavy:
        return
    # Convex: (1 / mean improvement) 2 L R^2 / eps steps.
    radius = max(np.linalg.norm(point - problem.minimiser) for point in points)
    assert gaps[-1] <= 2 * problem.smoothness * radius**2 / improvements.sum() + tolerance
    # Strongly convex: linear, hence (1 / mean improvement) kappa log(gap / eps) steps.
    factors = 1 - improvements * problem.strong / problem.smoothness
    assert gaps[-1] <= np.prod(factors) * gaps[0] + tolerance
    assert (
        gaps[-1] <= math.exp(-improvements.sum() * problem.strong / problem.smoothness) * gaps[0] + tolerance
    )


@settings(max_examples=10, deadline=None)
@given(kind=st.sampled_from([Quadratic, Logistic]), seed=SEEDS, dimension=st.integers(2, 8), make=COSTS)
def test_rate_of_tuned_stochastic_runs_on_average(kind, seed, dimension, make):
    problem, x, generator = start(kind, seed, dimension)
    runs = [tuned_run(problem, x, make, "stochastic", generator, 15) for _ in range(40)]
    gaps = np.array([problem(points[-1]) for points, _ in runs]) - problem.minimum
    # The improvement of a step depends on the path; its least value bounds every path.
    least = min(improvements.min() for _, improvements in runs)
    promised = (1 - least * problem.strong / problem.smoothness) ** 15 * (problem(x) - problem.minimum)
    assert gaps.mean() <= promised + 6 * gaps.std() / math.sqrt(len(gaps)) + SLACK * (1 + gaps[0])


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, dimension=st.integers(1, 400), tail=st.sampled_from([0.0, 1.0, 3.0]))
def test_worst_case_of_the_dynamic_sign_rule(seed, dimension, tail):
    generator = np.random.default_rng(seed)
    g = np.exp(tail * generator.normal(size=dimension))
    count = dynamic_sign_sparsity(g)
    beta = at(g, SignPayloadBits(dimension), count, "sign").improvement
    assert beta >= (1 - SLACK) / math.ceil(math.sqrt(dimension))


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, dimension=st.integers(1, 10), workers=st.integers(1, 5), make=COSTS)
def test_descent_with_several_workers(seed, dimension, workers, make):
    generator = np.random.default_rng(seed)
    problems = [Quadratic(generator, dimension) for _ in range(workers)]
    mean = Quadratic(generator, dimension)
    mean.hessian = sum(problem.hessian for problem in problems) / workers
    smoothness = np.linalg.eigvalsh(mean.hessian)[-1]
    x = generator.standard_t(2, size=dimension)
    gradients = [problem.gradient(x) for problem in problems]
    g = mean.gradient(x)
    tolerance = SLACK * (1 + mean(x))
    cost = make(dimension)
    # Largest magnitudes, step 1/L: what the workers leave out is lost.
    chosen = [best(one, cost) for one in gradients]
    sent = [
        compressed(one, choice.sparsity, "sparsify") for one, choice in zip(gradients, chosen, strict=True)
    ]
    lost = sum((1 - c.improvement) * (one @ one) for one, c in zip(gradients, chosen, strict=True)) / workers
    after = mean(x - np.mean(sent, axis=0) / smoothness)
    assert after <= mean(x) - (g @ g - lost) / (2 * smoothness) + tolerance
    # Unbiased sampling, any step: only variance is added, and less of it with more workers.
    chosen = [best(one, cost, "stochastic") for one in gradients]
    variances = np.zeros(dimension)
    noise = 0.0
    for one, choice in zip(gradients, chosen, strict=True):
        p = probabilities(one, choice.sparsity)
        variances += np.where(p > 0, one**2 * (1 / np.where(p > 0, p, 1) - 1), 0) / workers**2
        noise += (1 / choice.improvement - 1) * (one @ one) / workers**2
    for step in (0.1 / smoothness, 1 / smoothness, 2 / smoothness):
        after = mean.expected(x, step * g, step**2 * variances)
        promised = step * (1 - smoothness * step / 2) * (g @ g) - smoothness * step**2 / 2 * noise
        assert after <= mean(x) - promised + tolerance


@pytest.mark.parametrize("epsilon", [0.5, 0.1])
def test_rate_with_noisy_gradients(epsilon):
    # E|g - gradF|^2 <= sigma^2 and omega >= w: with the step w eps / (L (2 sigma^2 + eps)) the mean of
    # E|gradF|^2 over (1 / w)(1 + 2 sigma^2 / eps) 4 L (F0 - F*) / eps steps is at most eps.
    generator = np.random.default_rng(7)
    dimension, count, sigma = 6, 2, 0.5
    problem = Quadratic(generator, dimension)
    origin = generator.normal(size=dimension)
    least = count / dimension
    step = least * epsilon / (problem.smoothness * (2 * sigma**2 + epsilon))
    steps = (1 / least) * (1 + 2 * sigma**2 / epsilon) * 4 * problem.smoothness * problem(origin) / epsilon
    found = []
    for _ in range(3):
        x, total = origin, 0.0
        for _ in range(min(math.ceil(steps), 2000)):
            true = problem.gradient(x)
            total += true @ true
            noisy = true + generator.normal(size=dimension) * sigma / math.sqrt(dimension)
            x = x - step * compressed(noisy, count, "stochastic", generator)
        found.append(total / math.ceil(steps))
    assert np.mean(found) <= epsilon


def test_compressed_keeps_shape_and_count():
    g = np.array([[3.0, -4.0, 0.0], [1.0, -1.0, 1.0]])
    assert compressed(g, 3, "sparsify").tolist() == [[3, -4, 0], [1, 0, 0]]
    norm = math.sqrt(28)
    assert compressed(g, 2, "sign") == pytest.approx(np.array([[norm, -norm, 0], [0, 0, 0]]))
    drawn = compressed(g, 6, "stochastic", np.random.default_rng(0))
    assert drawn.tolist() == g.tolist()
    assert not compressed(np.zeros(4), 2, "sign").any()
    assert not compressed(np.zeros(4), 2, "stochastic", np.random.default_rng(0)).any()
    with pytest.raises(ConfigurationError, match="generator"):
        compressed(g, 2, "stochastic")
    with pytest.raises(ConfigurationError, match="whole"):
        compressed(g, 2.5, "sign")
    with pytest.raises(ConfigurationError, match="family"):
        compressed(g, 2, "top")
