r"""Compressors of the convex solvers: what each keeps, how good it is, and its bytes.

A compressor maps a vector to a message whose decoded form is close to it.  Two kinds of
promise exist (papers.md 2.2), with expectation over the compressor's own randomness:

* a *contraction* :math:`E\|Q(x)-x\|^2 \le (1-\delta)\|x\|^2`, stated by ``contraction(d)``;
* an *unbiased* map :math:`E\,U(x)=x,\ E\|U(x)\|^2\le(1+\omega)\|x\|^2`, stated by ``variance(d)``.

U / (1 + omega) is a contraction with delta = 1 / (1 + omega); the random compressors below have
both forms, chosen by ``unbiased``.  A compressor asked for the promise that it does not make
raises :class:`ConfigurationError`.

Both ends know the compressor and the dimension, so a message carries no header: it is the
coded support followed by the coded values, in whole bytes.  What the receiver decodes is, bit for
bit, what ``compress`` and ``rows`` return; rounding on the wire is part of the compression
error, so error feedback makes up for it.

``compress`` builds the message of one vector.  ``rows`` treats one vector per row and gives the
decoded rows and the sizes of their messages without building them, for many workers in one
process.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cost import Affine, CostModel, PayloadBits
from .errors import ConfigurationError, MessageError

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Counts = NDArray[np.int64]
Generators = Sequence[np.random.Generator]

VALUE_BITS = {"float64": 64, "float32": 32, "bfloat16": 16}
_UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Compressed:
    """One compressed vector.

    ``dense``: (d,) float64, what the receiver decodes.  ``message``: uint8, what is sent.
    """

    dense: Floats
    message: Bytes

    @property
    def bits(self) -> int:
        """Bits on the wire."""
        return 8 * self.message.size

    @property
    def indices(self) -> NDArray[np.int64]:
        """Ascending positions of the nonzero coordinates."""
        return np.flatnonzero(self.dense)

    @property
    def values(self) -> Floats:
        """The nonzero coordinates, by ascending position."""
        return self.dense[self.indices]


class Compressor(ABC):
    """See the module.  Vectors are finite float64 of d >= 1 elements."""

    @abstractmethod
    def rows(self, x: Floats, generators: Generators) -> tuple[Floats, Counts]:
        """(m, d) -> the decoded rows (m, d) and the bits of each message (m,).

        Row i draws from ``generators[i]`` alone, exactly as :meth:`compress` would.
        """

    @abstractmethod
    def compress(self, x: Floats, generator: np.random.Generator) -> Compressed:
        """Compress one vector (d,)."""

    @abstractmethod
    def decode(self, message: Bytes, dimension: int) -> Floats:
        """The (d,) float64 vector of a message; MessageError where its length is wrong."""

    @abstractmethod
    def extent(self, stream: Bytes, dimension: int) -> int:
        """Bytes of the first of several messages that follow one another without marks between;
        MessageError where the stream ends inside it."""

    def contraction(self, dimension: int) -> float:
        """delta, for vectors of that dimension."""
        raise ConfigurationError(
            f"{self} is unbiased and no contraction; use the form with unbiased=False here"
        )

    def variance(self, dimension: int) -> float:
        """omega, for vectors of that dimension."""
        raise ConfigurationError(f"{self} is biased; use RandK, Dithering or Natural with unbiased=True here")


# -- values and supports as bytes ------------------------------------------------------------


def round_values(x: Floats, kind: str) -> Floats:
    """``x`` as the receiver sees it after a trip as ``float64``, ``float32`` or ``bfloat16``."""
    if kind == "float64":
        return x
    narrow = x.astype(np.float32)
    if kind == "bfloat16":
        narrow = (_to_bfloat16(narrow).astype(np.uint32) << 16).view(np.float32)
    return narrow.astype(np.float64)


def _to_bfloat16(narrow: NDArray[np.float32]) -> NDArray[np.uint16]:
    word = narrow.view(np.uint32)
    return ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)  # to nearest, ties to even


def _encode_values(x: Floats, kind: str) -> Bytes:
    if kind == "bfloat16":
        return _to_bfloat16(x.astype(np.float32)).astype("<u2").view(np.uint8)
    return x.astype("<f8" if kind == "float64" else "<f4").view(np.uint8)


def _decode_values(message: Bytes, kind: str) -> Floats:
    packed = np.ascontiguousarray(message)
    if kind == "bfloat16":
        narrow = (packed.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        narrow = packed.view("<f8" if kind == "float64" else "<f4")
    with np.errstate(invalid="ignore"):  # a damaged message may hold a signalling NaN
        return narrow.astype(np.float64)


def index_width(dimension: int) -> int:
    """ceil(log2 d): bits of one index."""
    return (dimension - 1).bit_length()


_UNARY = 7


def _encode_count(count: int) -> Mask:
    """1 .. 7 in unary (zeros and a one): with an index of 7 bits each coordinate takes a byte.  Larger
    ones as seven zeros and the Elias gamma code of count - 7."""
    if count <= _UNARY:
        unary: Mask = np.arange(count) == count - 1
        return unary
    rest = count - _UNARY
    low = rest.bit_length() - 1
    head = np.arange(_UNARY + low + 1) == _UNARY + low
    return np.concatenate([head, _integers_to_bits(np.array([rest]), low)])


def _count_bits(count: int) -> int:
    return count if count <= _UNARY else _UNARY + 2 * (count - _UNARY).bit_length() - 1


def _decode_count(bits: Mask) -> int:
    zeros = int(np.argmax(bits)) if bits.any() else bits.size
    if zeros < _UNARY:
        if zeros == bits.size:
            raise _damaged("ends early")
        return zeros + 1
    low, start = zeros - _UNARY, zeros + 1
    if bits.size < start + low:
        raise _damaged("ends early")
    return _UNARY + (1 << low) + (int(_bits_to_integers(bits[start : start + low], low)[0]) if low else 0)


def _low_width(count: int, dimension: int) -> int:
    return max(0, (dimension // count).bit_length() - 1)


def _support_code(count: int, dimension: int) -> tuple[str, int]:
    """The shortest of four codes for a support of ``count`` out of ``dimension``, and its bits."""
    low = _low_width(count, dimension)
    codes = {
        "all": 0 if count == dimension else 1 << 62,
        "indices": count * index_width(dimension),
        "elias-fano": count * (low + 1) + ((dimension - 1) >> low),
        "bitmap": dimension,
    }
    name = min(codes, key=codes.__getitem__)
    return name, codes[name]


def _integers_to_bits(values: NDArray[Any], width: int) -> Mask:
    """Each value in ``width`` bits, least significant first."""
    return ((values[:, None] >> np.arange(width)) & 1).astype(np.bool_).ravel()


def _bits_to_integers(bits: Mask, width: int) -> NDArray[np.int64]:
    return (
        bits.reshape(-1, width).astype(np.int64) @ (1 << np.arange(width)) if width else np.zeros(0, np.int64)
    )


def _encode_support(indices: NDArray[np.int64], dimension: int) -> Mask:
    name, size = _support_code(indices.size, dimension)
    if name == "all":
        return np.zeros(0, np.bool_)
    if name == "indices":
        return _integers_to_bits(indices, index_width(dimension))
    bits = np.zeros(size, np.bool_)
    if name == "bitmap":
        bits[indices] = True
        return bits
    low = _low_width(indices.size, dimension)
    bits[: indices.size * low] = _integers_to_bits(indices, low)
    bits[indices.size * low + (indices >> low) + np.arange(indices.size)] = True
    return bits


def _decode_support(bits: Mask, count: int, dimension: int) -> NDArray[np.int64]:
    name, size = _support_code(count, dimension)
    bits = bits[:size]
    if name == "all":
        return np.arange(dimension)
    if name == "indices":
        width = index_width(dimension)
        indices = _bits_to_integers(bits, width) if bits.size == size else bits[:0].astype(np.int64)
    elif name == "bitmap":
        indices = np.flatnonzero(bits)
    else:
        low = _low_width(count, dimension)
        ones = np.flatnonzero(bits[count * low :])
        if ones.size != count:
            raise MessageError(
                "message holds a damaged support; sender and receiver must share their settings"
            )
        high = ones - np.arange(count)
        indices = (high << low) | (_bits_to_integers(bits[: count * low], low) if low else 0)
    if indices.size != count or (count and (indices[-1] >= dimension or (np.diff(indices) <= 0).any())):
        raise _damaged("holds a damaged support")
    return indices


def _pack(bits: Mask) -> Bytes:
    return np.packbits(bits, bitorder="little")


def _unpack(message: Bytes) -> Mask:
    return np.unpackbits(message, bitorder="little").astype(np.bool_)


def _whole_bytes(bits: int) -> int:
    """Bits rounded up to whole bytes, still in bits."""
    return 8 * ((int(bits) + 7) // 8)


def _within(stream: Bytes, size: int) -> int:
    if stream.size < size:
        raise _damaged(f"has {stream.size} bytes where {size} were due")
    return size


def _expect(message: Bytes, size: int) -> None:
    if message.size != size:
        raise _damaged(f"has {message.size} bytes where {size} were due")


def _damaged(what: str) -> MessageError:
    return MessageError(f"message {what}; sender and receiver must share compressor and dimension")


def _check(owner: Compressor, **at_least: float) -> None:
    for name, least in at_least.items():
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise ConfigurationError(
                f"{type(owner).__name__}: {name}={value!r} must be an integer >= {least}"
            )


def _check_value(owner: Compressor, kind: str) -> None:
    if kind not in VALUE_BITS:
        raise ConfigurationError(
            f"{type(owner).__name__}: value={kind!r} is unknown; use one of {', '.join(VALUE_BITS)}"
        )


# -- the compressors -------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity(Compressor):
    """Everything, in the given value type; float32 by default."""

    value: str = "float32"

    def __post_init__(self) -> None:
        _check_value(self, self.value)

    def rows(self, x: Floats, generators: Generators) -> tuple[Floats, Counts]:
        return round_values(x, self.value), np.full(len(x), x.shape[1] * VALUE_BITS[self.value])

    def compress(self, x: Floats, generator: np.random.Generator) -> Compressed:
        return Compressed(round_values(x, self.value), _encode_values(x, self.value))

    def extent(self, stream: Bytes, dimension: int) -> int:
        return _within(stream, dimension * VALUE_BITS[self.value] // 8)

    def decode(self, message: Bytes, dimension: int) -> Floats:
        _expect(message, self.extent(message, dimension))
        return _decode_values(message, self.value)

    def contraction(self, dimension: int) -> float:
        return 1.0 - _UNIT_ROUNDOFF[self.value] ** 2


DENSE = Identity()
"""The uncompressed message: every coordinate in float32."""


class _Sparse(Compressor):
    """Values on a support whose size both ends know."""

    k: int
    value: str

    def __post_init__(self) -> None:
        _check(self, k=1)
        _check_value(self, self.value)

    @abstractmethod
    def _mask(self, x: Floats, generators: Generators) -> Mask:
        """(m, d) with ``count(d)`` true entries per row."""

    def _scale(self, dimension: int) -> float:
        return 1.0

    def count(self, dimension: int) -> int:
        return min(self.k, dimension)

    def size(self, dimension: int) -> int:
        """Bits of a message."""
        count = self.count(dimension)
        return _whole_bytes(_support_code(count, dimension)[1]) + count * VALUE_BITS[self.value]

    def rows(self, x: Floats, generators: Generators) -> tuple[Floats, Counts]:
        mask = self._mask(x, generators)
        decoded = np.zeros_like(x)
        decoded[mask] = round_values(self._scale(x.shape[1]) * x[mask], self.value)
        return decoded, np.full(len(x), self.size(x.shape[1]))

    def compress(self, x: Floats, generator: np.random.Generator) -> Compressed:
        indices = np.flatnonzero(self._mask(x[None], [generator])[0])
        scaled = self._scale(x.size) * x[indices]
        dense = np.zeros_like(x)
        dense[indices] = round_values(scaled, self.value)
        support = _pack(_encode_support(indices, x.size))
        return Compressed(dense, np.concatenate([support, _encode_values(scaled, self.value)]))

    def extent(self, stream: Bytes, dimension: int) -> int:
        return _within(stream, self.size(dimension) // 8)

    def decode(self, message: Bytes, dimension: int) -> Floats:
        _expect(message, self.extent(message, dimension))
        count = self.count(dimension)
        split = message.size - count * VALUE_BITS[self.value] // 8
        dense = np.zeros(dimension)
        dense[_decode_support(_unpack(message[:split]), count, dimension)] = _decode_values(
            message[split:], self.value
        )
        return dense


def top_mask(x: Floats, count: int) -> Mask:
    """(m, d): the ``count`` largest magnitudes of each row; among equals the lowest index wins."""
    magnitude = np.abs(x)
    d = x.shape[1]
    if count >= d:
        return np.ones(x.shape, np.bool_)
    if count == 1:
        mask = np.zeros(x.shape, np.bool_)
        mask[np.arange(len(x)), np.argmax(magnitude, axis=1)] = True
        return mask
    threshold = np.partition(magnitude, d - count, axis=1)[:, d - count, None]
    mask = magnitude >= threshold
    for row in np.flatnonzero(mask.sum(axis=1) > count):  # ties: the last equals go
        equal = np.flatnonzero(magnitude[row] == threshold[row])
        mask[row, equal[equal.size - (int(mask[row].sum()) - count) :]] = False
    return mask


@dataclass(frozen=True)
class TopK(_Sparse):
    """The k largest magnitudes.  A contraction with delta = k / d (less the wire's rounding)."""

    k: int
    value: str = "float32"

    def _mask(self, x: Floats, generators: Generators) -> Mask:
        return top_mask(x, self.count(x.shape[1]))

    def contraction(self, dimension: int) -> float:
        return self.count(dimension) / dimension * (1.0 - _UNIT_ROUNDOFF[self.value] ** 2)


@dataclass(frozen=True)
class RandK(_Sparse):
    """k coordinates chosen uniformly.

    As a mask a contraction with delta = k / d; scaled by d / k (``unbiased``) omega = d / k - 1.
    """

    k: int
    unbiased: bool = False
    value: str = "float32"

    def _mask(self, x: Floats, generators: Generators) -> Mask:
        count = self.count(x.shape[1])
        mask = np.zeros(x.shape, np.bool_)
        for row, generator in enumerate(generators):
            mask[row, generator.choice(x.shape[1], count, replace=False, shuffle=False)] = True
        return mask

    def _scale(self, dimension: int) -> float:
        return dimension / self.count(dimension) if self.unbiased else 1.0

    def contraction(self, dimension: int) -> float:
        if self.unbiased:
            return super().contraction(dimension)
        return self.count(dimension) / dimension * (1.0 - _UNIT_ROUNDOFF[self.value] ** 2)

    def variance(self, dimension: int) -> float:
        if not self.unbiased:
            return super().variance(dimension)
        return dimension / self.count(dimension) * (1.0 + _UNIT_ROUNDOFF[self.value]) ** 2 - 1.0


@dataclass(frozen=True)
class SignTopK(Compressor):
    """S+Q: the signs of the k largest magnitudes, times their mean magnitude (one float32).

    A contraction with delta = 1 / d: it leaves ``|x|^2 - |x_T|_1^2 / T``, and
    ``|x_T|_1 >= |x_T| >= sqrt(T/d) |x|`` (papers.md 1.2b with the scale folded in).
    """

    k: int

    def __post_init__(self) -> None:
        _check(self, k=1)

    def count(self, dimension: int) -> int:
        return min(self.k, dimension)

    def size(self, dimension: int) -> int:
        """Bits of a message."""
        count = self.count(dimension)
        return 32 + _whole_bytes(_support_code(count, dimension)[1] + count)

    def rows(self, x: Floats, generators: Generators) -> tuple[Floats, Counts]:
        count = self.count(x.shape[1])
        mask = top_mask(x, count)
        mean = np.abs(x)[mask].reshape(len(x), count).sum(axis=1) / count
        signs = np.where(x < 0, -1.0, 1.0)
        decoded = np.where(mask, signs * round_values(mean, "float32")[:, None], 0.0)
        return decoded, np.full(len(x), self.size(x.shape[1]))

    def compress(self, x: Floats, generator: np.random.Generator) -> Compressed:
        dense = self.rows(x[None], [generator])[0][0]
        indices = np.flatnonzero(top_mask(x[None], self.count(x.size))[0])
        mean = np.abs(dense[indices[:1]])
        bits = np.concatenate([_encode_support(indices, x.size), np.signbit(dense[indices])])
        return Compressed(dense, np.concatenate([_encode_values(mean, "float32"), _pack(bits)]))

    def extent(self, stream: Bytes, dimension: int) -> int:
        return _within(stream, self.size(dimension) // 8)

    def decode(self, message: Bytes, dimension: int) -> Floats:
        _expect(message, self.extent(message, dimension))
        count = self.count(dimension)
        bits = _unpack(message[4:])
        support = _support_code(count, dimension)[1]
        indices = _decode_support(bits, count, dimension)
        dense = np.zeros(dimension)
        dense[indices] = np.where(bits[support : support + count], -1.0, 1.0) * _decode_values(
            message[:4], "float32"
        )
        return dense

    def contraction(self, dimension: int) -> float:
        return (1.0 - _UNIT_ROUNDOFF["float32"] ** 2) / dimension


class _Random(Compressor):
    """Independent per coordinate, hence treated row by row."""

    unbiased: bool

    @abstractmethod
    def _omega(self, dimension: int) -> float: ...

    def rows(self, x: Floats, generators: Generators) -> tuple[Floats, Counts]:
        found = [self.compress(row, generator) for row, generator in zip(x, generators, strict=True)]
        return np.stack([one.dense for one in found]), np.array([one.bits for one in found])

    def _factor(self, dimension: int) -> float:
        return 1.0 if self.unbiased else 1.0 / (1.0 + self._omega(dimension))

    def contraction(self, dimension: int) -> float:
        return super().contraction(dimension) if self.unbiased else 1.0 / (1.0 + self._omega(dimension))

    def variance(self, dimension: int) -> float:
        return self._omega(dimension) if self.unbiased else super().variance(dimension)


@dataclass(frozen=True)
class Dithering(_Random):
    """Random dithering: each magnitude over the Euclidean norm, rounded at random to a multiple of
    1 / levels.  omega = min(d / levels^2, sqrt(d) / levels).

    A message is the norm (float32), then per coordinate an Elias gamma code of level + 1 and the
    sign of those that are not zero.
    """

    levels: int
    unbiased: bool = False

    def __post_init__(self) -> None:
        _check(self, levels=1)

    def _omega(self, dimension: int) -> float:
        return min(dimension / self.levels**2, math.sqrt(dimension) / self.levels)

    def compress(self, x: Floats, generator: np.random.Generator) -> Compressed:
        draws = generator.random(x.size)
        norm = round_values(np.sqrt(np.sum(x * x, keepdims=True)), "float32")
        ratio = np.abs(x) * (self.levels / norm[0]) if norm[0] > 0 else np.zeros_like(x)
        level = np.floor(ratio + draws).astype(np.int64)
        negative = (x < 0) & (level > 0)
        code = level + 1
        width = np.frexp(code.astype(np.float64))[1] - 1  # floor(log2 code)
        unary = np.zeros(int(width.sum()) + x.size, np.bool_)
        unary[np.cumsum(width + 1) - 1] = True
        low = ((np.repeat(code, width) >> _counters(width)) & 1).astype(np.bool_)
        message = np.concatenate(
            [_encode_values(norm, "float32"), _pack(np.concatenate([unary, low, negative[level > 0]]))]
        )
        return Compressed(self._dense(norm[0], level, negative), message)

    def _layout(self, stream: Bytes, dimension: int) -> tuple[Mask, int, Counts]:
        """The bits after the norm, where the unary part ends, and the widths it gives."""
        bits = _unpack(stream[4:])
        ends = np.flatnonzero(bits)[:dimension]
        if ends.size < dimension:
            raise _damaged("ends early")
        width: Counts = np.diff(ends, prepend=-1) - 1
        start = int(ends[-1]) + 1
        if width.max() > 40 or bits.size < start + int(width.sum()):
            raise _damaged("ends early")
        return bits, start, width

    def extent(self, stream: Bytes, dimension: int) -> int:
        _, start, width = self._layout(stream, dimension)
        return _within(stream, 4 + _whole_bytes(start + int(width.sum()) + int(np.count_nonzero(width))) // 8)

    def decode(self, message: Bytes, dimension: int) -> Floats:
        _expect(message, self.extent(message, dimension))
        norm = _decode_values(message[:4], "float32")[0]
        bits, start, width = self._layout(message, dimension)
        total = int(width.sum())
        owner = np.repeat(np.arange(dimension), width)
        extra = np.bincount(owner, bits[start : start + total] * 2.0 ** _counters(width), dimension)
        level = (np.ones_like(width) << width) + extra.astype(np.int64) - 1
        negative = np.zeros(dimension, np.bool_)
        negative[level > 0] = bits[start + total : start + total + np.count_nonzero(width)]
        return self._dense(norm, level, negative)

    def _dense(self, norm: float, level: Counts, negative: Mask) -> Floats:
        unit = norm / self.levels * self._factor(level.size)
        dense: Floats = np.where(negative, -unit, unit) * level
        return dense


def _counters(width: Counts) -> Counts:
    """0 .. width[0] - 1, 0 .. width[1] - 1, ..."""
    return np.arange(int(width.sum())) - np.repeat(np.cumsum(width) - width, width)


@dataclass(frozen=True)
class Natural(_Random):
    """Natural compression: each magnitude rounded at random to one of the two powers of two around
    it, in 9 bits (sign and float32 exponent).  omega = 1/8.

    Magnitudes below 2^-126 are rounded at random to 0 or 2^-126; there omega is larger.
    """

    unbiased: bool = False

    def _omega(self, dimension: int) -> float:
        return 0.125

    def compress(self, x: Floats, generator: np.random.Generator) -> Compressed:
        draws = generator.random(x.size)
        magnitude = np.abs(x)
        mantissa, exponent = np.frexp(magnitude)  # magnitude = mantissa 2^exponent, mantissa in [1/2, 1)
        exponent = exponent - 1 + (draws < 2.0 * mantissa - 1.0)
        tiny = magnitude < 2.0**-126
        exponent = np.where(tiny, np.where(draws < magnitude * 2.0**126, -126, -127), exponent)
        if exponent.max() > 127:
            raise ConfigurationError("Natural: a magnitude is beyond float32's range; scale the vector down")
        code = (exponent + 127).astype(np.int64)  # 0 stands for zero
        negative = x < 0
        bits = np.concatenate([negative, _integers_to_bits(code, 8)])
        return Compressed(self._dense(code, negative), _pack(bits))

    def extent(self, stream: Bytes, dimension: int) -> int:
        return _within(stream, _whole_bytes(9 * dimension) // 8)

    def decode(self, message: Bytes, dimension: int) -> Floats:
        _expect(message, self.extent(message, dimension))
        bits = _unpack(message)
        return self._dense(_bits_to_integers(bits[dimension : 9 * dimension], 8), bits[:dimension])

    def _dense(self, code: Counts, negative: Mask) -> Floats:
        magnitude = np.where(code > 0, np.ldexp(self._factor(code.size), code - 127), 0.0)
        dense: Floats = np.where(negative, -magnitude, magnitude)
        return dense


@dataclass(frozen=True)
class AdaptiveTopK(Compressor):
    """Top-k with the k that improves most per cost: the rule of `core.efficiency` at every vector.

    A message is k (one bit for k = 1, two for k = 2), the support and the values.

    Parameters
    ----------
    cost: a cost model for the dimension of the vectors; its ``fixed`` part is what keeps k away
        from 1 (with a cost proportional to k the rule always takes k = 1).
    value: type of the values on the wire.
    """

    cost: CostModel
    value: str = "float32"

    def __post_init__(self) -> None:
        _check_value(self, self.value)
        if not isinstance(self.cost, CostModel):
            raise ConfigurationError(
                f"AdaptiveTopK: cost={self.cost!r} is no cost model; use one of hvd_adaptive.core.cost"
            )

    def _mask(self, x: Floats) -> tuple[Mask, Counts]:
        d = x.shape[1]
        if self.cost.dimension != d:
            raise ConfigurationError(
                f"AdaptiveTopK: cost is for dimension {self.cost.dimension} and the vectors have {d}; "
                "use cost.for_dimension"
            )
        magnitude = np.abs(x)
        order = np.argsort(-magnitude, axis=1, kind="stable")
        ordered = np.take_along_axis(magnitude, order, axis=1)
        largest = ordered[:, :1]
        energies = np.cumsum((ordered / np.where(largest > 0, largest, 1.0)) ** 2, axis=1)
        counts = np.arange(1.0, d + 1)
        total = np.where(energies[:, -1:] > 0, energies[:, -1:], 1.0)
        chosen = np.argmax(energies / total / self.cost(counts), axis=1) + 1
        mask = np.zeros(x.shape, np.bool_)
        np.put_along_axis(mask, order, np.arange(d) < chosen[:, None], axis=1)
        return mask, chosen

    def _size(self, counts: Counts, dimension: int) -> Counts:
        supports = [_whole_bytes(_count_bits(k) + _support_code(k, dimension)[1]) for k in map(int, counts)]
        sizes: Counts = np.array(supports) + counts * VALUE_BITS[self.value]
        return sizes

    def rows(self, x: Floats, generators: Generators) -> tuple[Floats, Counts]:
        mask, chosen = self._mask(x)
        return np.where(mask, round_values(x, self.value), 0.0), self._size(chosen, x.shape[1])

    def compress(self, x: Floats, generator: np.random.Generator) -> Compressed:
        indices = np.flatnonzero(self._mask(x[None])[0][0])
        dense = np.zeros_like(x)
        dense[indices] = round_values(x[indices], self.value)
        support = _pack(np.concatenate([_encode_count(indices.size), _encode_support(indices, x.size)]))
        return Compressed(dense, np.concatenate([support, _encode_values(x[indices], self.value)]))

    def extent(self, stream: Bytes, dimension: int) -> int:
        return _within(stream, int(self._size(np.array([self._count(stream, dimension)]), dimension)[0]) // 8)

    def _count(self, stream: Bytes, dimension: int) -> int:
        count = _decode_count(_unpack(stream[:16]))
        if count > dimension:
            raise _damaged("holds a damaged count")
        return count

    def decode(self, message: Bytes, dimension: int) -> Floats:
        _expect(message, self.extent(message, dimension))
        count = self._count(message, dimension)
        split = message.size - count * VALUE_BITS[self.value] // 8
        dense = np.zeros(dimension)
        indices = _decode_support(_unpack(message[:split])[_count_bits(count) :], count, dimension)
        dense[indices] = _decode_values(message[split:], self.value)
        return dense

    def contraction(self, dimension: int) -> float:
        return (1.0 - _UNIT_ROUNDOFF[self.value] ** 2) / dimension


def adaptive(dimension: int, overhead_bits: float, value: str = "float32") -> AdaptiveTopK:
    """`AdaptiveTopK` where a round costs its payload and ``overhead_bits`` beside it."""
    payload = PayloadBits(dimension, VALUE_BITS[value])
    return AdaptiveTopK(Affine(payload, 1.0, overhead_bits), value)
