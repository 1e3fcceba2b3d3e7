"""The wire message: some coordinates of a vector, self-describing, in int32 words.

======  ==========================================================================
word 0  checksum of all that follows (:func:`hvd_adaptive.core.hashing.checksum`)
word 1  magic number (16 bits), version (8), kind of values (4), code of the indices (4)
word 2  length of the message in words, padding included; even
word 3  count of coordinates, k
word 4  dimension, bits 0 to 31
word 5  width of the index code (16 bits), dimension, bits 32 to 47 (16)
word 6  words of the plane of remainders
word 7  words of the plane of quotients
then    the two planes of the indices (:mod:`hvd_adaptive.core.bits`), the values
        (:mod:`hvd_adaptive.core.values`), zeros up to the length
======  ==========================================================================

A dense message carries all coordinates and has no planes.  A message of no coordinates is legal.

Lengths are rounded up to a geometric grid of 16 steps per power of two, so that the lengths that a
tensor's messages take from step to step are few: Horovod's response cache is keyed by them.

Everything here runs on NumPy, torch and TensorFlow arrays alike, and gives the same bits; while
TensorFlow traces, the kind of the values must be named, since the graph depends on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import bits, hashing, kernels
from .backend import Array, Backend, backend_of
from .errors import ConfigurationError, MessageError
from .numpy_backend import NUMPY
from .values import BY_NUMBER, ValueKind, value_kind

MAGIC = 0xADA1
VERSION = 1
HEADER_WORDS = 8
MAX_DIMENSION = (1 << 48) - 1
_MAX_WORDS = (1 << 31) - 1


class Size(NamedTuple):
    """The size of a message in bits: what it needs, and what is sent with the padding."""

    useful_bits: Any
    sent_bits: Any


class Header(NamedTuple):
    """The numbers in front of a message; Python ints, or scalars of a graph."""

    code: Any
    kind: ValueKind
    total: Any
    count: Any
    dimension: Any
    width: Any
    low_words: Any
    unary_words: Any


def encode(indices: Array, values: Array, dimension: int, kind: str = "fp32", *, pad: bool = True) -> Array:
    """The message that says ``vector[indices] = values`` of a vector of ``dimension`` elements.

    Args:
        indices: int64[k], strictly ascending, in ``0 .. dimension - 1``; k may be 0.
        values: float32[k] (other float types are converted), finite.
        dimension: at most 2**48 - 1.
        kind: a name in :data:`hvd_adaptive.core.values.KINDS`.
        pad: round the length up to the geometric grid.

    Returns:
        int32 words, one-dimensional, of even length.

    Raises:
        ConfigurationError: ``kind`` is unknown or ``dimension`` too large.
        MessageError: the indices do not ascend or leave their range.
    """
    if not 0 <= dimension <= MAX_DIMENSION:
        raise ConfigurationError(f"dimension={dimension} must be between 0 and {MAX_DIMENSION}")
    b, leave, indices, values = _enter(indices, _float32(values))
    planes = bits.encode_indices(b, b.cast(indices, "int64"), dimension)
    return leave(_seal(b, planes, values, dimension, value_kind(kind), pad))


def encode_dense(values: Array, kind: str = "fp32", *, pad: bool = True) -> Array:
    """The message of all elements of ``values``, float32[d], without index bits."""
    b, leave, values = _enter(_float32(values))
    nothing = b.zeros(0, "int32", values)
    planes = bits.Planes(bits.DENSE, 0, nothing, nothing)
    return leave(_seal(b, planes, values, b.length(values), value_kind(kind), pad))


def decoded_values(values: Array, kind: str = "fp32") -> Array:
    """What a receiver of ``values`` will hold, float32[k], bit for bit; error feedback needs it.

    For ``fp32`` these are ``values`` themselves.
    """
    b, leave, values = _enter(_float32(values))
    return leave(value_kind(kind).reconstruct(b, values))


def decode(words: Array, dimension: int | None = None, kind: str | None = None) -> tuple[Array, Array]:
    """``(indices, values)`` of one message: int64[k], ascending, and float32[k].

    The values may lie in the memory of ``words``.

    Args:
        words: int32, exactly one message.
        dimension: what the message must state, if given.
        kind: the kind of values that the message must state, if given.

    Raises:
        MessageError: the message is truncated, corrupt, of another version, or not what was asked for;
            found before anything is allocated that the length of ``words`` and the dimension do not bound.
    """
    b, leave, words = _enter(words)
    words, header = _open(b, words, dimension, kind)
    indices = b.cond(
        header.code == bits.DENSE,
        lambda: b.arange(header.count, words),
        lambda: _indices(b, words, header),
    )
    return leave(indices), leave(_values(b, words, header))


def split(words: Array, count: int) -> list[Array]:
    """The ``count`` messages that stand one after the other in ``words``, as an allgather leaves them.

    Raises MessageError where the lengths in their headers do not add up; the contents are not read.
    """
    b, leave, words = _enter(words)
    return [leave(part) for part in _split(b, words, count)]


def accumulate(
    words: Array,
    count: int,
    dimension: int,
    kind: str | None = None,
    *,
    scale: Array | None = None,
    into: Array | None = None,
) -> Array:
    """The sum of ``count`` messages that stand one after the other, float32[dimension].

    They are added in the order in which they stand, so all ranks compute the same bits.  ``scale``, a
    float32 scalar, multiplies every value before it is added.  ``into``, a
    float32[dimension] array that is needed no more, gives its storage where the backend can use it,
    which spares the memory and the page faults of a new one.  Raises MessageError as :func:`split` and
    :func:`decode`; ``into`` is then partly overwritten.
    """
    b, leave, words, *given = _enter(*(x for x in (words, scale, into) if x is not None))
    if into is None:
        total = b.zeros(dimension, "float32", words)
    else:
        total = given.pop()
        if b.length(total) != dimension or b.dtype(total) != "float32":
            raise ConfigurationError(f"into= must be float32 with {dimension} elements")
        total = b.clear_(total)
    factor = given.pop() if given else None
    for message in _split(b, words, count):
        total = _add(b, total, *_open(b, message, dimension, kind), factor)
    return leave(total)


def size(words: Array, kind: str | None = None) -> Size:
    """The size of the first message in ``words``, which must be sound; ``kind`` as for :func:`decode`."""
    b = backend_of(words)
    fields = _fields(b, words)
    form = BY_NUMBER[fields[1] // 16 % 16] if kind is None else value_kind(kind)
    return Size(32 * (HEADER_WORDS + fields[6] + fields[7] + form.words(fields[3])), 32 * fields[2])


def _float32(values: Array) -> Array:
    return backend_of(values).cast(values, "float32")


def _enter(*arrays: Array) -> Any:
    """``(backend, leave, *arrays)``: NumPy arrays where the kernels can work on the arrays' memory, and
    the function that takes results back."""
    like = arrays[-1]
    b = backend_of(like)
    found = [kernels.host(b, x) for x in arrays]
    if any(array is None for array in found):
        return b, lambda x: x, *arrays
    return NUMPY, lambda x: b.from_host(x, like), *found


def _split(b: Backend, words: Array, count: int) -> list[Array]:
    if b.dtype(words) != "int32":
        raise MessageError(f"messages are int32 words, not {b.dtype(words)}")
    parts = []
    for rank in range(count):
        left = b.length(words)
        words = b.check(left >= HEADER_WORDS, f"message {rank} of {count} is cut off in its header", words)
        fields = _fields(b, words)
        total = fields[2]
        words = b.check(
            (total >= HEADER_WORDS) & (total <= left),
            f"message {rank} of {count} states a length that does not fit what was received",
            words,
        )
        total = _settled(b, words, fields)[2]
        parts.append(words[:total])
        words = words[total:]
    if parts:
        complete = b.length(words) == 0
        parts[-1] = b.check(complete, f"data is left after the last of {count} messages", parts[-1])
    return parts


def _seal(
    b: Backend, planes: bits.Planes, values: Array, dimension: Any, kind: ValueKind, pad: bool
) -> Array:
    payload = kind.encode(b, values)
    low_words, unary_words = b.length(planes.low), b.length(planes.unary)
    used = HEADER_WORDS + low_words + unary_words + b.length(payload)
    total = _on_grid(b, used) if pad else (used + 1) // 2 * 2
    fields = [
        0,
        planes.code + kind.number * 16 + VERSION * 256 + MAGIC * 65536,
        total,
        b.length(values),
        dimension % (1 << 32),
        planes.width + dimension // (1 << 32) * 65536,
        low_words,
        unary_words,
    ]
    header = bits.to_words(b, b.constant(fields, "int64", values))
    padding = b.zeros(total - used, "int32", values)
    words = b.concat([header, planes.low, planes.unary, payload, padding])
    words = b.check(total <= _MAX_WORDS, "the message is longer than 2**31 words; split the tensor", words)
    return b.concat([hashing.checksum(b, words), words[1:]])


def _on_grid(b: Backend, words: Any) -> Any:
    """``words`` rounded up to a multiple of a sixteenth of the power of two below it; even."""
    if isinstance(words, int):
        step = 1 << max(words.bit_length() - 5, 1)
    else:
        step = b.shift_left(b.constant(1, "int64", words), bits.larger(b, bits.bit_length(b, words) - 5, 1))
    return (words + step - 1) // step * step


def _fields(b: Backend, words: Array) -> list[Any]:
    return b.items(bits.from_words(b, words[:HEADER_WORDS]), HEADER_WORDS)


def _settled(b: Backend, words: Array, fields: list[Any]) -> list[Any]:
    """The fields, from words that passed the checks: in a graph what is read from them waits for these."""
    return fields if isinstance(fields[2], int) else _fields(b, words)


def _open(b: Backend, words: Array, dimension: int | None, kind: str | None) -> tuple[Array, Header]:
    """``words`` and their header, after every check that needs no decoding."""
    if b.dtype(words) != "int32":
        raise MessageError(f"a message is int32 words, not {b.dtype(words)}")
    words = b.check(b.length(words) >= HEADER_WORDS, "the message is cut off in its header", words)
    fields = _fields(b, words)
    words = b.check(fields[1] // 65536 == MAGIC, "this is no message (wrong magic number)", words)
    words = b.check(
        fields[1] // 256 % 256 == VERSION,
        f"the message is of another version than {VERSION}; install the same hvd_adaptive on all ranks",
        words,
    )
    words = b.check(
        fields[2] == b.length(words), "the message is truncated (it states another length)", words
    )
    words = b.check(fields[2] % 2 == 0, "the message is corrupt (odd length)", words)
    stated, computed = b.items(b.concat([words[:1], hashing.checksum(b, words)]), 2)
    words = b.check(stated == computed, "the message is corrupt (wrong checksum)", words)
    number = fields[1] // 16 % 16
    if kind is not None:
        form = value_kind(kind)
        words = b.check(number == form.number, f"the message has values of another kind than {kind}", words)
    elif isinstance(number, int):
        words = b.check(number in BY_NUMBER, f"the message has values of an unknown kind ({number})", words)
        form = BY_NUMBER[number]
    else:
        raise ConfigurationError("while TensorFlow traces, name the values that messages carry: pass kind=")
    header = _header(fields, form)
    if dimension is not None:
        words = b.check(
            header.dimension == dimension, f"the message is for another dimension than {dimension}", words
        )
    dense = header.code == bits.DENSE
    planes = header.low_words + header.unary_words
    sound = (
        (header.code <= bits.DENSE)
        & (header.width <= bits.MAX_WIDTH)
        & (header.count <= header.dimension)
        # Enough bits for the count, and no more than the message has room for.
        & (HEADER_WORDS + planes + form.words(header.count) <= header.total)
        & ((32 * header.unary_words >= header.count) | dense)
        & (((header.count == header.dimension) & (planes == 0)) | (header.code != bits.DENSE))
        & ((header.dimension < 1 << 31) | (header.code != bits.GOLOMB))
    )
    words = b.check(sound, "the message is corrupt (its header contradicts itself)", words)
    return words, _header(_settled(b, words, fields), form)


def _header(fields: list[Any], kind: ValueKind) -> Header:
    return Header(
        code=fields[1] % 16,
        kind=kind,
        total=fields[2],
        count=fields[3],
        dimension=fields[4] + fields[5] // 65536 * (1 << 32),
        width=fields[5] % 65536,
        low_words=fields[6],
        unary_words=fields[7],
    )


def _indices(b: Backend, words: Array, header: Header) -> Array:
    middle = HEADER_WORDS + header.low_words
    low, unary = words[HEADER_WORDS:middle], words[middle : middle + header.unary_words]
    planes = bits.Planes(header.code, header.width, low, unary)
    return bits.decode_indices(b, planes, header.count, header.dimension)


def _values(b: Backend, words: Array, header: Header) -> Array:
    start = HEADER_WORDS + header.low_words + header.unary_words
    return header.kind.decode(b, words[start : start + header.kind.words(header.count)], header.count)


def _add(b: Backend, total: Array, words: Array, header: Header, scale: Array | None) -> Array:
    """``total`` with one message added, in its storage where that can be."""
    values = _values(b, words, header)
    if scale is not None:
        values = values * scale

    def sparse() -> Array:
        indices = _indices(b, words, header)
        arrays = kernels.host(b, total), kernels.host(b, indices), kernels.host(b, values)
        if any(array is None for array in arrays):
            return b.scatter_add_(total, indices, values)
        kernels.add_at(*arrays)
        return total

    return b.cond(header.code == bits.DENSE, lambda: b.add_(total, values), sparse)
