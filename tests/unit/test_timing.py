"""The clock of a step, told from a fake one."""

import numpy as np

from hvd_adaptive.core.numpy_backend import NUMPY
from hvd_adaptive.core.timing import FEW, KEPT, SETTLED, StepClock, Wholes


class Fake:
    def __init__(self):
        self.time = 100.0

    def __call__(self):
        return self.time

    def after(self, seconds):
        self.time += seconds
        return self.time


def step(clock, fake, compute, compress=(0.1,), network=5.0):
    """One step: ``compute`` seconds before each tensor is compressed, then the reduction."""
    for before, own in zip(compute, compress, strict=True):
        began = fake.after(before)
        clock.compressing(began, fake.after(own))
    fake.after(network)
    for _ in compress:
        clock.reduced()


def test_the_first_step_tells_nothing():
    fake = Fake()
    clock = StepClock(fake)
    assert clock.compute == 0.0
    step(clock, fake, [3.0])
    assert clock.compute == 0.0


def test_compression_and_network_are_left_out():
    fake = Fake()
    clock = StepClock(fake)
    step(clock, fake, [9.0, 9.0], [1.0, 1.0])
    step(clock, fake, [2.0, 0.5], [0.25, 0.125], network=50.0)
    assert clock.compute == 2.5
    step(clock, fake, [2.0, 0.5], [40.0, 0.125], network=0.0)
    assert clock.compute == 2.5


def test_the_median_of_recent_steps_counts():
    fake = Fake()
    clock = StepClock(fake)
    for seconds in (9.0, 1.0, 1.0, 77.0):  # the first is not measured, the last was interrupted
        step(clock, fake, [seconds])
    assert clock.compute == 1.0
    for _ in range(KEPT):
        step(clock, fake, [4.0])
    assert clock.compute == 4.0


def test_several_results_of_one_step_count_once():
    fake = Fake()
    clock = StepClock(fake)
    for _ in range(3):
        step(clock, fake, [1.0, 1.0, 1.0], [0.5, 0.5, 0.5])
    assert clock.compute == 3.0


def test_the_first_step_of_a_kind_is_not_counted():
    wholes = Wholes(*np.zeros(len(Wholes._fields)))
    for seconds, dense in (
        [(0.3, False)] * (SETTLED + 1) + [(0.3, True)] + [(1.4, True)] * FEW + [(1.4, False)]
    ):
        wholes = wholes.after(NUMPY, np.float64(seconds), np.bool_(dense))
    np.testing.assert_allclose(wholes.told(NUMPY), (0.3, 1.4))
    for seconds in (0.3, 3.0, 0.3, 0.3):  # and an interruption hardly does
        wholes = wholes.after(NUMPY, np.float64(seconds), np.bool_(False))
    assert 0.3 < wholes.sparse < 0.36
