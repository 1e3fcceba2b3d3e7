"""Messages of several tensors in one array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.core import message
from hvd_adaptive.core.errors import MessageError
from hvd_adaptive.core.parcel import contents_words, pack, unpack


def words(*numbers):
    return np.array(numbers, np.int32)


LIKE = words()
SLOTS = (0, 5, 7)


def test_what_is_packed_comes_out_rank_by_rank():
    first = pack({5: words(1, 2, 3), 0: words(4)}, LIKE)
    second = pack({0: words(), 7: words(9)}, LIKE)
    nothing = pack({}, LIKE)
    assert len(first) == contents_words(2) + 4
    found = [(r, s, m.tolist()) for r, s, m in unpack(np.concatenate([first, nothing, second]), 3, SLOTS)]
    assert found == [(0, 0, [4]), (0, 5, [1, 2, 3]), (2, 0, []), (2, 7, [9])]


@pytest.mark.parametrize("cut", range(7))
def test_a_parcel_that_is_cut_off_is_refused(cut):
    whole = pack({5: words(1, 2, 3), 0: words(4)}, LIKE)
    with pytest.raises(MessageError, match="rank 0 are cut off"):
        list(unpack(whole[:cut], 1, SLOTS))


@pytest.mark.parametrize("bad", [words(-1), words(2**31 - 1), words(1, 0, -5, 1), words(1, 0, 2**31 - 1, 1)])
def test_absurd_contents_are_refused(bad):
    with pytest.raises(MessageError, match="cut off"):
        list(unpack(bad, 1, SLOTS))


@pytest.mark.parametrize(
    "bad, said",
    [
        (words(1, 3, 1, 9), "not of the tensors"),
        (words(1, -5, 1, 9), "not of the tensors"),
        (words(2, 5, 1, 5, 1, 9, 9), "not of the tensors"),
        (words(1, 5, 1, 9, 9), "data is left"),
        (words(0, 0), "data is left"),
    ],
)
def test_unknown_repeated_and_left_over_messages_are_refused(bad, said):
    with pytest.raises(MessageError, match=said):
        list(unpack(bad, 1, SLOTS))


@given(st.integers(0, 2**20), st.integers(0, 31))
@settings(deadline=None, max_examples=150)
def test_a_flipped_bit_anywhere_is_found_before_anything_is_added_up(place, bit):
    rng = np.random.default_rng(0)
    parts = {slot: message.encode(np.arange(3) * 7, rng.normal(size=3), 50) for slot in SLOTS}
    whole = np.concatenate([pack(parts, LIKE)] * 2)
    whole.view(np.uint32)[place % len(whole)] ^= np.uint32(1 << bit)
    with pytest.raises(MessageError):
        for _, _, part in list(unpack(whole, 2, SLOTS)):
            message.decode(part, 50)
