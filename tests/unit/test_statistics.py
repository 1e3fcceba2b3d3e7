"""Sums and shares of what was sent."""

import dataclasses

import pytest

from hvd_adaptive.core.statistics import Statistics, Traffic


def test_traffic_adds_up():
    one = Traffic(1, 2, 3, 4, 5, 0.5, 0.25)
    two = Traffic(10, 20, 30, 40, 50, 1.0, 2.0)
    assert one + two == Traffic(11, 22, 33, 44, 55, 1.5, 2.25)
    assert one + Traffic() == one


def test_ratio():
    """T76."""
    assert Traffic(bits_sent=5, bits_dense=100).ratio == 0.05
    assert Traffic().ratio == 1.0


def test_reports_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Traffic().bits_sent = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        Statistics().step = 3
