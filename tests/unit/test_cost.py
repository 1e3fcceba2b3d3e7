"""The cost models against their formulas, in their stated units."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.core.cost import (
    Affine,
    DenseBits,
    LinkTime,
    Packets,
    PayloadBits,
    SignPayloadBits,
    index_bits,
)
from hvd_adaptive.core.errors import ConfigurationError

DIMENSIONS = st.integers(1, 5000)


@pytest.mark.parametrize("dimension", [1, 2, 3, 4, 5, 300, 1023, 1024, 1025, 10**7])
def test_index_bits_is_the_ceiling_of_the_logarithm(dimension):
    assert 2 ** index_bits(dimension) >= dimension
    assert dimension == 1 or 2 ** (index_bits(dimension) - 1) < dimension


def test_worked_values():
    assert PayloadBits(300)(99) == 99 * 41
    assert PayloadBits(300, value_bits=16)(99) == 99 * 25
    assert SignPayloadBits(300)(99) == 32 + 99 * 10
    assert Affine(PayloadBits(300), per_unit=2.0, fixed=5.0)(3) == 2 * 3 * 41 + 5
    assert DenseBits(300, value_bits=16)(3) == 48
    # 512 bytes carry 4096 bits: 99 pairs of 41 bits, not 100.
    assert Packets(PayloadBits(300))(99) == 576 + 64
    assert Packets(PayloadBits(300))(100) == 2 * 576 + 64
    assert Packets(PayloadBits(300), packet_bytes=1460, header_bytes=78, message_bytes=0)(300) == 2 * 1538
    link = LinkTime(PayloadBits(300), bandwidth=1e6, latency=1e-3, compute=0.5, world_size=4)
    assert link(100) == pytest.approx(0.5 + 3 * (1e-3 + 4100 / 1e6))
    ring = LinkTime(PayloadBits(300), 1e6, 1e-3, 0.5, world_size=4, collective="allreduce")
    assert ring(100) == pytest.approx(0.5 + 6e-3 + 2 * 3 / 4 * 4100 / 1e6)


def test_allgather_grows_with_the_world_and_allreduce_hardly():
    """T75."""
    payload = PayloadBits(1000)
    gather = [LinkTime(payload, 1e9, world_size=n)(10) for n in (2, 4, 8, 64)]
    reduce = [LinkTime(payload, 1e9, world_size=n, collective="allreduce")(10) for n in (2, 4, 8, 64)]
    assert np.divide(gather, gather[0]) == pytest.approx([1, 3, 7, 63])
    assert reduce[0] < reduce[-1] < 2 * reduce[0]


def models(dimension):
    payloads = [
        PayloadBits(dimension),
        PayloadBits(dimension, 1.5),
        SignPayloadBits(dimension),
        DenseBits(dimension, 16),
    ]
    return [
        *payloads,
        *(Affine(p, 1e-9, 0.25) for p in payloads),
        *(Packets(p) for p in payloads),
        *(Packets(p, 1460, 78, 0) for p in payloads),
        *(LinkTime(p, 1e8, 1e-4, 0.01, 4) for p in payloads),
        *(LinkTime(p, 1e8, 1e-4, 0.01, 4, "allreduce") for p in payloads),
    ]


@settings(max_examples=60, deadline=None)
@given(dimension=DIMENSIONS)
def test_arrays_agree_with_numbers_never_decrease_and_follow_the_affine_form(dimension):
    counts = np.unique(np.linspace(0, dimension, 40).astype(int))
    for model in models(dimension):
        cost = model(counts)
        assert cost.dtype == np.float64
        assert cost.tolist() == [model(int(count)) for count in counts]
        assert isinstance(model(int(counts[0])), float)
        assert (np.diff(cost) >= 0).all()
        form = model.fixed + model.head + model.marginal() * counts
        if model.affine:
            np.testing.assert_allclose(cost, form, rtol=1e-12)
        else:
            packet = model.packet_bytes + model.header_bytes
            assert (cost >= form * (1 - 1e-12)).all()
            assert (cost < form + packet * (1 + 1e-12)).all()


@settings(max_examples=100, deadline=None)
@given(
    dimension=DIMENSIONS,
    packet_bytes=st.sampled_from([1, 3, 8, 512, 1460]),
    value_bits=st.sampled_from([1, 1.58, 16, 32, 64]),
    sign=st.booleans(),
)
def test_full_packets_are_full(dimension, packet_bytes, value_bits, sign):
    payload = SignPayloadBits(dimension, value_bits) if sign else PayloadBits(dimension, value_bits)
    model = Packets(payload, packet_bytes)
    full = model.full()
    assert full[-1] == dimension
    assert (np.diff(full) > 0).all()
    cost = model(full)
    assert len(np.unique(cost)) == len(cost)
    # A little more would need the next packet.
    assert (model(full[:-1] * (1 + 1e-9) + 1e-9) > cost[:-1]).all()
    if packet_bytes == 512:
        # Every cost that some whole T has is one of theirs.
        assert set(model(np.arange(1, dimension + 1))) <= set(cost)


@given(dimension=DIMENSIONS)
def test_for_another_dimension_only_the_index_changes(dimension):
    for model in models(300):
        other = model.for_dimension(dimension)
        assert type(other) is type(model)
        assert other.dimension == dimension
        assert other.fixed == model.fixed
        assert other.unit == model.unit
        assert other.for_dimension(300) == model


def test_with_payload_keeps_the_rest():
    link = LinkTime(PayloadBits(300), 1e6, 1e-3, 0.5, 4)
    assert link.with_payload(SignPayloadBits(7)) == LinkTime(SignPayloadBits(7), 1e6, 1e-3, 0.5, 4)


def test_one_worker_sends_nothing():
    link = LinkTime(PayloadBits(300), 1e6, 1e-3, compute=0.5, world_size=1)
    assert link(1) == link(300) == 0.5


PAYLOAD = PayloadBits(300)


@pytest.mark.parametrize(
    "field, make",
    [
        ("dimension", lambda: PayloadBits(0)),
        ("dimension", lambda: PayloadBits(2.5)),
        ("dimension", lambda: SignPayloadBits("300")),
        ("value_bits", lambda: PayloadBits(300, value_bits=0)),
        ("norm_bits", lambda: SignPayloadBits(300, norm_bits=-1)),
        ("value_bits", lambda: DenseBits(300, value_bits=None)),
        ("per_unit", lambda: Affine(PAYLOAD, -1, 1)),
        ("fixed", lambda: Affine(PAYLOAD, 1, math.nan)),
        ("per_unit and fixed", lambda: Affine(PAYLOAD, 0, 0)),
        ("payload", lambda: Affine(300, 1, 1)),
        ("payload", lambda: LinkTime(Packets(PAYLOAD), 1e9)),
        ("packet_bytes", lambda: Packets(PAYLOAD, packet_bytes=0)),
        ("packet_bytes", lambda: Packets(PAYLOAD, packet_bytes=0.5)),
        ("header_bytes", lambda: Packets(PAYLOAD, header_bytes=-1)),
        ("message_bytes", lambda: Packets(PAYLOAD, message_bytes=None)),
        ("bandwidth", lambda: LinkTime(PAYLOAD, 0)),
        ("bandwidth", lambda: LinkTime(PAYLOAD, math.inf)),
        ("latency", lambda: LinkTime(PAYLOAD, 1e9, latency=-1e-3)),
        ("compute", lambda: LinkTime(PAYLOAD, 1e9, compute=True)),
        ("compute", lambda: LinkTime(PAYLOAD, 1e9, world_size=1)),
        ("world_size", lambda: LinkTime(PAYLOAD, 1e9, world_size=0)),
        ("collective", lambda: LinkTime(PAYLOAD, 1e9, collective="broadcast")),
        ("sparsity", lambda: PAYLOAD(301)),
        ("sparsity", lambda: PAYLOAD(np.array([-1, 3]))),
        ("sparsity", lambda: PAYLOAD(math.nan)),
    ],
)
def test_a_wrong_setting_is_named(field, make):
    with pytest.raises(ConfigurationError, match=field):
        make()
