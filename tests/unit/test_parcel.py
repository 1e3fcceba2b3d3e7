"""Messages of several tensors in one array."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_adaptive.core.errors import MessageError
from hvd_adaptive.core.parcel import contents_words, pack, unpack


def words(*numbers):
    return np.array(numbers, np.int32)


LIKE = words()


def test_what_is_packed_comes_out_rank_by_rank():
    first = pack({5: words(1, 2, 3), 0: words(4)}, LIKE)
    second = pack({0: words(), 7: words(9)}, LIKE)
    nothing = pack({}, LIKE)
    assert len(first) == contents_words(2) + 4
    found = [(r, s, m.tolist()) for r, s, m in unpack(np.concatenate([first, nothing, second]), 3)]
    assert found == [(0, 0, [4]), (0, 5, [1, 2, 3]), (2, 0, []), (2, 7, [9])]


@pytest.mark.parametrize("cut", range(7))
def test_a_parcel_that_is_cut_off_is_refused(cut):
    whole = pack({5: words(1, 2, 3), 0: words(4)}, LIKE)
    with pytest.raises(MessageError, match="rank 0 are cut off"):
        list(unpack(whole[:cut], 1))


@pytest.mark.parametrize("bad", [words(-1), words(2**31 - 1), words(1, 0, -5, 1), words(1, 0, 2**31 - 1, 1)])
def test_absurd_contents_are_refused(bad):
    with pytest.raises(MessageError, match="cut off"):
        list(unpack(bad, 1))
