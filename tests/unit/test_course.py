"""When steps are dense: by the cost model, or by measured times where there are some."""

import numpy as np
import pytest

from hvd_adaptive.core import course
from hvd_adaptive.core.cost import LinkTime, PayloadBits
from hvd_adaptive.core.course import DENSE_STEPS, MEASURED_STEPS, REVIEW_STEPS, TRIAL_STEPS
from hvd_adaptive.core.numpy_backend import NUMPY
from hvd_adaptive.core.recipe import adaptive, restate

DIMENSION = 10**6
SLOW = LinkTime(PayloadBits(1), bandwidth=1e8)  # a dense exchange takes 0.32 s
FAST = LinkTime(PayloadBits(1), bandwidth=1e13)


def train(cost, steps, sparse, dense, compute=0.01):
    """(dense?, reason) of each step, where whole steps take ``sparse`` or ``dense`` seconds; both may be
    functions of the step."""
    tuned = restate(adaptive(cost=cost), DIMENSION, 2).adaptive
    ring = np.float64(course.ring_cost(tuned, DIMENSION))
    heading, taken = course.Heading(*np.zeros(4)), {False: [], True: []}
    kinds = []
    for step in range(steps):
        now = bool(heading.dense)
        kinds.append(now)
        taken[now].append((dense if now else sparse)(step))
        lately = {kind: times[-1] if len(times) >= 4 else 0.0 for kind, times in taken.items()}
        totals = course.Totals(1.0, 1.0, tuned.cost.fixed + compute, 1e-3, lately[False], lately[True])
        if now:  # no ballots in a dense step
            totals = course.Totals(*np.zeros(6))
        heading, _ = course.follow(NUMPY, tuned, ring, heading, course.Totals(*map(np.float64, totals)))
    return kinds


def constant(seconds):
    return lambda step: seconds


def spells(kinds):
    """Lengths of the runs of equal steps."""
    edges = np.flatnonzero(np.diff(np.array(kinds, int))) + 1
    return np.diff([0, *edges, len(kinds)]).tolist()


def test_a_slow_link_is_never_tried_densely():
    assert not any(train(SLOW, 2000, constant(0.05), constant(0.4)))


def test_dense_steps_are_tried_where_they_may_be_faster_and_kept_where_they_are():
    kinds = train(SLOW, 1000, constant(0.4), constant(0.3))
    assert spells(kinds)[:5] == [4, TRIAL_STEPS, 1, MEASURED_STEPS, 1]


def test_a_trial_that_fails_is_repeated_only_at_the_review():
    kinds = train(SLOW, 1100, constant(0.3), constant(0.45))
    assert spells(kinds)[:4] == [4, TRIAL_STEPS, 1 + REVIEW_STEPS, TRIAL_STEPS]


def test_what_was_measured_overrules_the_model():
    assert spells(train(FAST, 400, constant(0.02), constant(0.03)))[1] == DENSE_STEPS
    late = train(FAST, 1000, constant(0.02), constant(0.03))[-200:]
    assert not any(late)


def test_a_link_that_becomes_slow_is_noticed():
    kinds = train(FAST, 1500, constant(0.02), lambda step: 0.01 if step < 500 else 0.2)
    assert all(kinds[300:450]) or kinds[300:450].count(False) <= 2
    assert not any(kinds[1000:])


@pytest.mark.parametrize("share", [None, 0.1])
def test_a_step_that_takes_longer_than_its_parts_bears_more(share):
    tuned = restate(adaptive(cost=SLOW, share=share), DIMENSION, 2).adaptive

    def price(whole, fixed=0.02, variable=0.004):
        heading = course.Heading(*map(np.float64, (100, 100.0, 0, 10_000)))
        totals = course.Totals(*map(np.float64, (1, 1, fixed, variable, whole, 0)))
        return course.follow(NUMPY, tuned, np.float64(0.3), heading, totals)[0].price

    assert price(0.08 + 0.004) == price(0.0, fixed=0.08) < price(0.0)
    assert price(0.02) == price(0.0)  # where the backward pass hides some of it


@pytest.mark.parametrize("compute", [0.01, 1.0])
def test_a_stated_time_is_not_measured(compute):
    cost = LinkTime(PayloadBits(1), bandwidth=1e8, compute=compute)
    assert not adaptive(cost=cost).adaptive.measure
