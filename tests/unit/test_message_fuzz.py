"""Hostile input: whatever the words, decoding gives a sound result or a MessageError, in bounded memory."""

import contextlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.core import hashing, kernels, message
from hvd_adaptive.core.errors import MessageError
from hvd_adaptive.core.numpy_backend import NUMPY
from hvd_adaptive.core.values import KINDS

torch = pytest.importorskip("torch")

DIMENSION = 5000
WORD = st.integers(-(2**31), 2**31 - 1)


def _examples():
    rng = np.random.default_rng(0)
    for kind in sorted(KINDS):
        blocks = (rng.integers(0, DIMENSION, 4)[:, None] + np.arange(9)).ravel() % DIMENSION
        for indices in (rng.choice(DIMENSION, 60, replace=False), blocks, [17], []):
            indices = np.unique(indices).astype(np.int64)
            values = rng.standard_t(2, len(indices)).astype(np.float32)
            yield message.encode(indices, values, DIMENSION, kind)
        yield message.encode_dense(rng.standard_normal(40).astype(np.float32), kind)


EXAMPLES = list(_examples())
examples = st.sampled_from(EXAMPLES)


def sealed(words):
    """``words`` under a checksum that fits: what an adversary, not a flipped bit, would send."""
    words = np.array(words)
    if len(words) >= 2 and len(words) % 2 == 0:
        words[:1] = hashing.checksum(NUMPY, words)
    return words


def outcome(words, dimension=None):
    """What decoding gives on one path: ``None`` for a MessageError."""
    try:
        indices, values = message.decode(words, dimension)
    except MessageError:
        return None
    indices, values = np.asarray(indices), np.asarray(values)
    assert indices.dtype == np.int64 and values.dtype == np.float32 and len(indices) == len(values)
    assert np.all(np.diff(indices) > 0)
    assert len(indices) == 0 or (indices[0] >= 0 and (dimension is None or indices[-1] < dimension))
    return indices.tolist(), values.view(np.int32).tolist()


def outcome_everywhere(words, dimension=None):
    """The same, which the kernels and the primitives of both libraries must agree on."""
    result = outcome(words, dimension)
    with kernels.disabled():
        assert outcome(words, dimension) == result
        assert outcome(torch.from_numpy(words), dimension) == result
    return result


@given(examples, st.lists(st.integers(0, 2**20), min_size=1, max_size=5, unique=True))
@settings(deadline=None, max_examples=120)
def test_flipped_bits_are_found(words, places):
    flipped = words.copy()
    places = {place % (32 * len(words)) for place in places}
    for place in places:
        flipped[place // 32] ^= np.array(1 << place % 32, np.uint32).view(np.int32)
    with pytest.raises(MessageError):
        message.decode(flipped)
    with pytest.raises(MessageError):
        message.accumulate(np.concatenate([words, flipped]), 2, DIMENSION)


def test_every_single_bit_is_covered():
    words = EXAMPLES[0]
    for place in range(32 * len(words)):
        flipped = words.copy()
        flipped[place // 32] ^= np.array(1 << place % 32, np.uint32).view(np.int32)
        with pytest.raises(MessageError):
            message.decode(flipped)


@given(examples, st.data())
@settings(deadline=None, max_examples=100)
def test_truncated_and_extended_messages_are_found(words, data):
    for cut in (words[: data.draw(st.integers(0, len(words) - 1))], np.concatenate([words, words[:2] * 0])):
        with pytest.raises(MessageError):
            message.decode(cut)
        with pytest.raises(MessageError):
            message.split(cut, 1)


@given(st.lists(WORD, max_size=60))
@settings(deadline=None, max_examples=100)
def test_garbage_is_refused(garbage):
    words = np.array(garbage, dtype=np.int32)
    for hostile in (words, sealed(words)):
        for call in (message.decode, lambda w: message.split(w, 1), lambda w: message.accumulate(w, 2, 9)):
            with pytest.raises(MessageError):
                call(hostile)


@given(examples, st.dictionaries(st.integers(0, 2**20), WORD | st.integers(0, 64), min_size=1, max_size=4))
@settings(deadline=None, max_examples=120)
def test_any_words_under_a_right_checksum_are_safe(words, changes):
    hostile = words.copy()
    for place, word in changes.items():
        hostile[place % len(words)] = word
    hostile[1] = words[1]  # or the magic number would end it at once
    hostile = sealed(hostile)
    outcome_everywhere(hostile)
    outcome_everywhere(hostile, DIMENSION)


@given(examples, st.lists(st.sampled_from(range(1, 8)), min_size=1, max_size=3), st.data())
@settings(deadline=None, max_examples=120)
def test_absurd_headers_are_safe_and_allocate_little(words, fields, data):
    hostile = words.copy()
    extremes = [0, 1, 31, 32, 1000, DIMENSION, 2**16 - 1, 2**24, 2**31 - 1, -1, -(2**31), -(2**16)]
    for field in fields:
        hostile[field] = data.draw(st.sampled_from(extremes))
    if data.draw(st.booleans()):  # keep the magic number, the version and the kind
        hostile[1] = words[1] - words[1] % 16 + data.draw(st.integers(0, 3))
    hostile[2] = data.draw(st.sampled_from([hostile[2], len(words)]))
    hostile = sealed(hostile)
    outcome_everywhere(hostile)
    tracemalloc.start()
    try:
        outcome(hostile)
        with kernels.disabled():
            outcome(hostile)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000 + 4000 * len(words)
    finally:
        tracemalloc.stop()


def test_the_sentences_say_what_is_wrong():
    words = EXAMPLES[0]

    def refused(change, dimension=DIMENSION):
        hostile = words.copy()
        change(hostile)
        with pytest.raises(MessageError) as caught:
            message.decode(sealed(hostile), dimension)
        return str(caught.value)

    def setter(field, value):
        return lambda w: w.__setitem__(field, value)

    assert "magic number" in refused(setter(1, 0))
    assert "another version than 1; install the same" in refused(setter(1, words[1] + 256))
    assert "unknown kind (15)" in refused(setter(1, words[1] | 0xF0))
    assert "states another length" in refused(setter(2, len(words) + 2))
    assert "another dimension than 4999" in refused(lambda w: None, 4999)
    assert "contradicts itself" in refused(setter(3, DIMENSION + 1))
    assert "another count of indices" in refused(setter(3, words[3] - 1))
    assert "beyond the dimension" in refused(setter(5, words[5] + 12))
    with pytest.raises(MessageError, match="int32 words, not int64"):
        message.decode(words.astype(np.int64))


@given(examples, st.lists(st.sampled_from(range(1, 8)), min_size=1, max_size=3), st.data())
@settings(deadline=None, max_examples=60)
def test_adding_up_never_allocates_more_than_the_dimension_allows(words, fields, data):
    """A rank's words are its own; what they make the others allocate is bounded by d."""
    hostile = words.copy()
    for field in fields:
        hostile[field] = data.draw(st.sampled_from([0, 7, 2**24, 2**31 - 1, -1, -(2**31), len(words)]))
    hostile[2] = data.draw(st.sampled_from([hostile[2], len(words)]))
    hostile = sealed(hostile)
    tracemalloc.start()
    try:
        for path in (hostile, torch.from_numpy(hostile)):
            with contextlib.suppress(MessageError):
                message.accumulate(path, 1, DIMENSION)
        assert tracemalloc.get_traced_memory()[1] < 64 * (DIMENSION + len(words)) + 200_000
    finally:
        tracemalloc.stop()
