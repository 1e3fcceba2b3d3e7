"""Compressors: their promises, their bytes, and the two ways to the same decoded vector."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_adaptive.core import efficiency
from hvd_adaptive.core.compressors import (
    AdaptiveTopK,
    Dithering,
    Identity,
    Natural,
    RandK,
    SignTopK,
    TopK,
    adaptive,
)
from hvd_adaptive.core.cost import Affine, Packets, PayloadBits
from hvd_adaptive.core.errors import ConfigurationError, MessageError

NUMBERS = st.floats(-1e6, 1e6).filter(lambda v: v == 0 or abs(v) > 1e-30)
VALUES = ["float64", "float32", "bfloat16"]


@st.composite
def vectors(draw, most=60):
    d = draw(st.integers(1, most))
    kind = draw(st.sampled_from(["any", "ties", "spike", "heavy"]))
    if kind == "any":
        return draw(arrays(np.float64, d, elements=NUMBERS))
    if kind == "ties":
        return draw(arrays(np.float64, d, elements=st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0])))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    if kind == "heavy":
        return rng.standard_cauchy(d)
    x = np.zeros(d)
    x[rng.integers(d)] = -3.7
    return x


def every(d: int, k: int, value: str):
    yield from (Identity(value), TopK(k, value), RandK(k, False, value), RandK(k, True, value), SignTopK(k))
    yield from (Dithering(k), Dithering(k, unbiased=True), Natural(), Natural(unbiased=True))
    yield adaptive(d, 40.0 * k, value)


@settings(deadline=None, max_examples=50)
@given(x=vectors(), k=st.integers(1, 70), value=st.sampled_from(VALUES), seed=st.integers(0, 99))
def test_message_rows_and_decoder_agree_to_the_bit(x, k, value, seed):
    for compressor in every(x.size, k, value):
        one = compressor.compress(x, np.random.default_rng(seed))
        rows, bits = compressor.rows(np.stack([x, x]), [np.random.default_rng(seed)] * 2)
        assert rows[0].tobytes() == one.dense.tobytes(), compressor
        assert bits[0] == one.bits, compressor
        assert compressor.decode(one.message, x.size).tobytes() == one.dense.tobytes(), compressor
        stream = np.concatenate([one.message, np.full(5, 0xA5, np.uint8)])
        assert compressor.extent(stream, x.size) == one.message.size, compressor


@settings(deadline=None, max_examples=50)
@given(x=vectors(), k=st.integers(1, 70), value=st.sampled_from(VALUES))
def test_deterministic_contractions_hold_for_every_vector(x, k, value):
    energy = np.sum(x * x)
    for compressor in (Identity(value), TopK(k, value), SignTopK(k), adaptive(x.size, 30.0 * k, value)):
        error = np.sum((compressor.compress(x, np.random.default_rng(0)).dense - x) ** 2)
        assert error <= (1 - compressor.contraction(x.size)) * energy * (1 + 1e-9), compressor


@pytest.mark.parametrize("d", [1, 6, 40])
@pytest.mark.parametrize("kind", ["normal", "heavy", "spike"])
def test_random_compressors_hold_their_promise_in_the_mean(d, kind):
    rng = np.random.default_rng(d)
    x = {"normal": rng.normal(size=d), "heavy": rng.standard_cauchy(size=d), "spike": np.eye(d)[0]}[kind]
    draws, energy = 2000, np.sum(x * x)
    generators = [np.random.default_rng(5)] * draws
    k = max(1, d // 4)
    for compressor in (RandK(k, True), Dithering(1, True), Dithering(7, True), Natural(True)):
        sample, _ = compressor.rows(np.tile(x, (draws, 1)), generators)
        rare = np.abs(x) * np.sqrt(energy)  # the largest variance of a coordinate under dithering
        spread = np.sqrt((sample.var(axis=0) + rare) / draws)
        assert (np.abs(sample.mean(axis=0) - x) <= 5 * spread + 1e-6 * np.abs(x)).all(), compressor
        squares = np.sum(sample**2, axis=1)
        noise = 4 * squares.std() / np.sqrt(draws)
        assert squares.mean() <= (1 + compressor.variance(d)) * energy + noise + 1e-6 * energy, compressor
    for compressor in (RandK(k), Dithering(1), Dithering(7), Natural()):
        sample, _ = compressor.rows(np.tile(x, (draws, 1)), generators)
        errors = np.sum((sample - x) ** 2, axis=1)
        noise = 4 * errors.std() / np.sqrt(draws)
        assert errors.mean() <= (1 - compressor.contraction(d)) * energy + noise + 1e-6 * energy, compressor


def test_rand_k_chooses_every_coordinate_equally_often():
    sample, _ = RandK(3).rows(np.ones((6000, 10)), [np.random.default_rng(1)] * 6000)
    assert np.abs(sample.mean(axis=0) - 0.3).max() < 5 * np.sqrt(0.3 * 0.7 / 6000)


@settings(deadline=None, max_examples=50)
@given(x=vectors(), per_message=st.floats(0.1, 500), packets=st.booleans())
def test_the_adaptive_compressor_follows_the_tuning_rule(x, per_message, packets):
    payload = PayloadBits(x.size)
    cost = Packets(payload, int(np.ceil(per_message))) if packets else Affine(payload, 1.0, per_message)
    sent = AdaptiveTopK(cost, "float64").compress(x, np.random.default_rng(0)).dense
    best = efficiency.best(x, cost)
    reached = efficiency.at(x, cost, max(1, np.count_nonzero(sent)))
    assert reached.efficiency == pytest.approx(best.efficiency, rel=1e-9)
    if np.any(x):
        assert np.sum(sent**2) == pytest.approx(best.improvement * np.sum(x * x), rel=1e-9)


def test_a_cost_in_proportion_to_k_sends_one_and_a_high_one_per_message_sends_all():
    x = np.random.default_rng(0).normal(size=50)
    for overhead, expected in ((0.0, 1), (1e9, 50)):
        assert (
            np.count_nonzero(adaptive(50, overhead).compress(x, np.random.default_rng(0)).dense) == expected
        )


@pytest.mark.parametrize(
    ("compressor", "d", "bits"),
    [
        (TopK(1), 112, 8 + 32),  # a 7-bit index in one byte
        (TopK(1, "bfloat16"), 112, 8 + 16),
        (TopK(11), 112, 64 + 352),  # Elias-Fano: 11 * 4 + 13 = 57 bits
        (TopK(112), 112, 3584),
        (TopK(60, "bfloat16"), 112, 112 + 960),  # a bitmap
        (SignTopK(11), 112, 32 + 72),
        (Natural(), 112, 1008),
        (Identity(), 112, 3584),
        (TopK(9), 1, 32),
        (adaptive(112, 0.0), 112, 8 + 32),  # as top-1: one bit says so
    ],
)
def test_message_sizes(compressor, d, bits):
    x = np.random.default_rng(0).normal(size=d)
    assert compressor.compress(x, np.random.default_rng(0)).bits == bits


def test_every_count_of_the_adaptive_compressor_survives_the_wire():
    for d in (1, 2, 9, 40, 300):
        for k in range(1, d + 1):
            x = np.zeros(d)
            x[:k] = 1.0
            one = adaptive(d, 1e6).compress(x, np.random.default_rng(0))
            assert one.indices.size == k
            assert (adaptive(d, 1e6).decode(one.message, d) == one.dense).all()


def test_dithering_with_sqrt_d_levels_needs_about_three_bits_a_coordinate():
    x = np.random.default_rng(0).normal(size=10_000)
    one = Dithering(100).compress(x, np.random.default_rng(0))
    assert one.bits < 32 + 3.0 * 10_000
    assert Dithering(100).contraction(10_000) == 0.5


@settings(deadline=None, max_examples=50)
@given(x=vectors(), k=st.integers(1, 70), data=st.data())
def test_a_damaged_message_gives_an_error_or_a_vector_never_a_crash(x, k, data):
    for compressor in every(x.size, k, "float32"):
        message = compressor.compress(x, np.random.default_rng(0)).message
        with pytest.raises(MessageError):
            compressor.decode(np.append(message, np.zeros(3, np.uint8)), x.size)
        with pytest.raises(MessageError):
            compressor.decode(message[: message.size // 2], x.size)
        flipped = message.copy()
        flipped[data.draw(st.integers(0, message.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
        with contextlib.suppress(MessageError):
            assert compressor.decode(flipped, x.size).shape == x.shape


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: TopK(0), "k=0"),
        (lambda: TopK(2.5), "k=2.5"),
        (lambda: RandK(3, value="half"), "value='half'"),
        (lambda: Dithering(0), "levels=0"),
        (lambda: AdaptiveTopK(3.0), "cost=3.0"),
        (lambda: TopK(3).variance(9), "biased"),
        (lambda: RandK(3, unbiased=True).contraction(9), "unbiased=False"),
        (lambda: adaptive(9, 1.0).compress(np.ones(8), np.random.default_rng()), "dimension 9"),
        (lambda: Natural().compress(np.full(2, 1e39), np.random.default_rng()), "range"),
    ],
)
def test_wrong_settings_are_named(make, word):
    with pytest.raises(ConfigurationError, match=word):
        make()
