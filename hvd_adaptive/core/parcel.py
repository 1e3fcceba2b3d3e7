"""Messages of several tensors in one array of words, as one collective carries them.

A parcel begins with its contents: the number of messages, then pairs of slot and length in words.
Parcels of different ranks may differ in what they hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .backend import Array, Backend, backend_of


def contents_words(count: int) -> int:
    """The words that the contents of ``count`` messages take."""
    return 1 + 2 * count


def pack(messages: Mapping[int, Array], like: Array) -> Array:
    """The parcel of ``messages`` (int32, one-dimensional, by slot): int32 words."""
    b = backend_of(like)
    slots = sorted(messages)
    contents = [len(slots), *(n for slot in slots for n in (slot, b.length(messages[slot])))]
    return b.concat([b.constant(contents, "int32", like), *(messages[slot] for slot in slots)])


def unpack(words: Array, count: int, slots: Collection[int]) -> Iterator[tuple[int, int, Array]]:
    """``(rank, slot, message)`` of each message in ``count`` parcels that stand one after the other.

    ``slots``: those that may be in them.  Raises MessageError where the contents do not fit what was
    received.
    """
    b = backend_of(words)
    for rank in range(count):
        (number,) = _numbers(b, words, 0, 1, rank)
        contents = _numbers(b, words, 1, 2 * number, rank)
        words = words[contents_words(number) :]
        known = set(contents[::2]) <= set(slots) and len(set(contents[::2])) == number
        words = b.check(known, f"the messages of rank {rank} are not of the tensors that were sent", words)
        for slot, length in zip(contents[::2], contents[1::2], strict=True):
            whole = b.check(0 <= length <= b.length(words), _CUT.format(rank), words)
            yield rank, slot, whole[:length]
            words = words[length:]
    b.check(b.length(words) == 0, f"data is left after the last of {count} parcels", words)


_CUT = "the messages of rank {} are cut off"


def _numbers(b: Backend, words: Array, start: int, count: int, rank: int) -> list[Any]:
    words = b.check(0 <= count <= b.length(words) - start, _CUT.format(rank), words)
    return b.items(words[start : start + count], count)
