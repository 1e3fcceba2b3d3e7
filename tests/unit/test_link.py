"""Measured links: the line through what was timed, the file between, and what is refused."""

import json
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.core import link
from hvd_adaptive.core.cost import DenseBits, PayloadBits
from hvd_adaptive.core.errors import ConfigurationError
from hvd_adaptive.core.link import Line, Link
from hvd_adaptive.core.recipe import adaptive, restate

LINK = Link(4, Line(3e-3, 3e-8), Line(6e-3, 2e-8), compute=0.05)


@given(st.floats(1e-6, 1e-1), st.floats(1e-11, 1e-6))
def test_the_fit_finds_the_line(fixed, per_byte):
    line = link.fit([(4 * count, fixed + per_byte * 4 * count) for count in link.SIZES])
    assert line.fixed == pytest.approx(fixed, rel=1e-6, abs=1e-7)
    assert line.per_byte == pytest.approx(per_byte, rel=1e-6, abs=1e-12)
    assert line.error < 1e-6


@pytest.mark.parametrize("samples", [[(64, 3.0), (4096, 1.0)], [(64, 1e-6), (4096, 1.0), (16384, 1.0)]])
def test_no_coefficient_is_negative(samples):
    line = link.fit(samples)
    assert line.fixed >= 0 and line.per_byte >= 0 and line.fixed + line.per_byte > 0


class Timed:
    """Collectives that take what a line says, now and then ten times that."""

    def __init__(self, line, interrupted=0.1):
        self.line, self.time, self.calls, self.rng = line, 0.0, 0, np.random.default_rng(0)
        self.interrupted = interrupted

    def allgather(self, count):
        self.calls += 1
        usual = self.line.fixed + self.line.per_byte * 4 * count
        self.time += usual * (10 if self.rng.random() < self.interrupted else 1)

    allreduce = allgather

    def mean(self, values):
        return values

    def now(self):
        return self.time


def test_interrupted_measurements_do_not_count():
    timed = Timed(Line(1e-4, 1e-9))
    found = link.measure(timed, 3, now=timed.now, repeats=9)
    assert found.world_size == 3
    for line in (found.allgather, found.allreduce):
        assert line.fixed == pytest.approx(1e-4, rel=1e-3) and line.per_byte == pytest.approx(1e-9, rel=1e-3)


def test_slow_links_are_spared_the_large_sizes():
    timed, seen = Timed(Line(1e-3, 1e-6)), []
    link.measure(timed, 2, now=timed.now, longest=0.05, report=lambda count, seconds: seen.append(count))
    assert seen == list(link.SIZES[:3])  # 64 KiB take 66 ms


@pytest.mark.parametrize("per_byte", [1e-6, 8e-8, 8e-9, 1e-9])
def test_training_waits_a_quarter_of_a_second_for_the_link(per_byte, monkeypatch):
    timed = Timed(Line(1e-3, per_byte), interrupted=0)
    monkeypatch.setattr(link, "_known", {})
    monkeypatch.setattr(link, "measure", partial(link.measure, now=timed.now))
    found = link.measured([0, 1], timed)
    assert timed.time < 0.35  # by the clock of what is pretended
    assert found.allgather.per_byte == pytest.approx(per_byte, rel=1e-3)


def test_a_cost_charges_what_was_measured():
    cost = LINK.cost(PayloadBits(1000))
    bits = PayloadBits(1000)(100)
    assert cost(100) == pytest.approx(0.05 + 3e-3 + 3e-8 * bits / 8)
    dense = cost.ring(DenseBits(1000))
    assert dense(1000) == pytest.approx(0.05 + 6e-3 + 2e-8 * 4000)


def test_a_file_comes_back(tmp_path):
    LINK.save(tmp_path / "link.json")
    assert link.load(tmp_path / "link.json") == LINK
    tuned = adaptive(cost=str(tmp_path / "link.json")).adaptive
    assert tuned.cost == LINK.cost(PayloadBits(1, 4)) and not tuned.auto and not tuned.measure
    assert tuned.objective == "progress"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "[" * 100_000,
        "{}",
        '{"format": 2}',
        b"\xff\xfe",
        json.dumps({"format": 1, "world_size": 2, "allgather": {"fixed": 1}, "allreduce": {}}),
        json.dumps({"format": 1, "world_size": 1, "allgather": {"fixed": 1, "per_byte": 1}}),
        json.dumps(
            {
                "format": 1,
                "world_size": 2,
                "allgather": {"fixed": 1, "per_byte": -1},
                "allreduce": {"fixed": 1, "per_byte": 1},
            }
        ),
        json.dumps({"format": 1, "x": "y" * link.GREATEST_FILE}),
    ],
)
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "link.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigurationError, match="calibrate"):
        adaptive(cost=str(path))


def test_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot be read.*hvd-adaptive calibrate"):
        adaptive(cost=str(tmp_path / "none.json"))


def test_a_link_is_measured_only_where_it_was_asked_for():
    bits = PayloadBits(5000, 4)
    assert restate(adaptive(), 5000, 4, LINK).adaptive.cost == LINK.cost(bits)
    assert restate(adaptive(), 5000, 4).adaptive.cost.bandwidth == 1e9
    stated = adaptive(cost=LINK.cost(PayloadBits(1)))
    assert restate(stated, 5000, 2, LINK).adaptive.cost.bandwidth == LINK.cost(bits).bandwidth
    assert restate(stated, 5000, 2, LINK).adaptive.cost.world_size == 2


def test_the_ranks_measure_once():
    timed = Timed(Line(1e-3, 1e-9))
    first = link.measured([0, 77], timed)
    calls = timed.calls
    assert link.measured([0, 77], timed) is first and timed.calls == calls
    assert link.measured([0, 78], timed) is not first


def test_all_ranks_measure_where_one_does_not_know():
    timed = Timed(Line(1e-3, 1e-9))
    known = link.measured([0, 79], timed)
    timed.mean = lambda values: [value / 2 if len(values) == 1 else value for value in values]
    assert link.measured([0, 79], timed) is not known
