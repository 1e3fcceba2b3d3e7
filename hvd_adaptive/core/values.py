"""The kinds of values that a message can carry: float32 in, words out, float32 back.

A kind turns magnitudes and signs into integer codes of a fixed number of bits and back, in integer
arithmetic on the bits of float32, so that every backend and device gives the same codes.  Values
must be finite: the pipeline sends no message for a gradient with NaN or infinity.

The bits of a positive float32, read as an integer, are a piecewise linear approximation to the
logarithm of its value.  ``fp16``, ``int8`` and ``int4`` quantise that integer uniformly between the
smallest and the largest magnitude of the message: what a float format does with a fixed exponent
range, here with just the range that the message needs.  The relative error is then about the same
for large and small values, as suits the heavy tails of gradients, and no value overflows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import bits, kernels
from .backend import Array, Backend
from .errors import ConfigurationError

_MANTISSA = 23
_ONE_BINADE = 1 << _MANTISSA
_LARGEST = 0x7F7FFFFF  # the bits of the largest finite float32
_SIGN = 1 << 31


@dataclass(frozen=True)
class ValueKind(ABC):
    """How values are written.

    Attributes:
        name: what users call it.
        number: what the header calls it (0 .. 15), fixed for ever.
        bits: bits per value.
        scale_words: 32-bit words per message beside them.
        lossy: whether values can change.
        error: the bound on the error of one value, in words.
    """

    name: str
    number: int
    bits: int
    scale_words: int
    lossy: bool
    error: str

    @abstractmethod
    def quantise(self, b: Backend, values: Array) -> tuple[Array, Array]:
        """``(scales, codes)`` of float32 ``values``: int32[scale_words] and int64 below 2**bits."""

    @abstractmethod
    def dequantise(self, b: Backend, scales: Array, codes: Array) -> Array:
        """float32 values of ``codes``; never NaN or infinite for codes made by :meth:`quantise`."""

    @abstractmethod
    def codes(self, words: kernels.Words) -> tuple[list[int], kernels.Words]:
        """:meth:`quantise` by compiled loops, on the bits of float32."""

    @abstractmethod
    def restored(self, scales: list[int], codes: kernels.Words) -> kernels.Words:
        """:meth:`dequantise` by compiled loops, to the bits of float32."""

    def words(self, count: Any) -> Any:
        """The number of words that ``count`` values take."""
        return self.scale_words + bits.words_for(count * self.bits)

    def encode(self, b: Backend, values: Array) -> Array:
        """int32 words of float32 ``values``."""
        array = kernels.host(b, values)
        if array is not None:
            numbers, found = self.codes(array.view(np.uint32))
            out = np.zeros(self.words(len(array)), np.uint32)
            out[: self.scale_words] = numbers
            kernels.pack(found, self.bits, out[self.scale_words :])
            return b.from_host(out.view(np.int32), values)
        scales, codes = self.quantise(b, values)
        count = b.length(values)
        packed = bits.pack(b, codes, b.arange(count, values) * self.bits, bits.words_for(count * self.bits))
        return b.concat([scales, packed])

    def decode(self, b: Backend, words: Array, count: Any) -> Array:
        """``count`` float32 values of the words that :meth:`encode` made."""
        array = kernels.host(b, words)
        if array is not None:
            unsigned = array.view(np.uint32)
            found = kernels.unpack(unsigned[self.scale_words :], self.bits, count)
            restored = self.restored(unsigned[: self.scale_words].tolist(), found)
            return b.from_host(restored.view(np.float32), words)
        packed = words[self.scale_words :]
        codes = bits.unpack(b, packed, b.arange(count, words) * self.bits, (1 << self.bits) - 1)
        return self.dequantise(b, words[: self.scale_words], codes)

    def reconstruct(self, b: Backend, values: Array) -> Array:
        """What the receiver will hold: bit for bit ``decode(encode(values))``."""
        array = kernels.host(b, values)
        if array is not None:
            restored = self.restored(*self.codes(array.view(np.uint32)))
            return b.from_host(restored.view(np.float32), values)
        return self.dequantise(b, *self.quantise(b, values))


class Float32(ValueKind):
    """The values as they are."""

    def quantise(self, b: Backend, values: Array) -> tuple[Array, Array]:
        return b.zeros(0, "int32", values), bits.from_words(b, b.bitcast(values, "int32"))

    def dequantise(self, b: Backend, scales: Array, codes: Array) -> Array:
        return b.bitcast(bits.to_words(b, codes), "float32")

    def codes(self, words: kernels.Words) -> tuple[list[int], kernels.Words]:
        return [], words

    def restored(self, scales: list[int], codes: kernels.Words) -> kernels.Words:
        return codes

    def encode(self, b: Backend, values: Array) -> Array:
        return b.bitcast(values, "int32")

    def decode(self, b: Backend, words: Array, count: Any) -> Array:
        return b.bitcast(words, "float32")

    def reconstruct(self, b: Backend, values: Array) -> Array:
        return values


class BFloat16(ValueKind):
    """The upper half of a float32, rounded to nearest, ties to even; never rounded to infinity."""

    def quantise(self, b: Backend, values: Array) -> tuple[Array, Array]:
        sign, magnitude = _sign_and_magnitude(b, values)
        rounded = b.shift_right(magnitude + 0x7FFF + (b.shift_right(magnitude, 16) & 1), 16)
        rounded = b.where(rounded < _LARGEST >> 16, rounded, _LARGEST >> 16)
        return b.zeros(0, "int32", values), sign * (1 << 15) + rounded

    def dequantise(self, b: Backend, scales: Array, codes: Array) -> Array:
        return b.bitcast(bits.to_words(b, codes * (1 << 16)), "float32")

    def codes(self, words: kernels.Words) -> tuple[list[int], kernels.Words]:
        return [], kernels.bfloat16_codes(words)

    def restored(self, scales: list[int], codes: kernels.Words) -> kernels.Words:
        return codes << 16


@dataclass(frozen=True)
class Fitted(ValueKind):
    """A sign and a step on a ladder of magnitudes that spans those of the message.

    Scales: ``low``, the float32 bits of the smallest magnitude above zero, and ``step``.  Code 0 is
    zero, code c the magnitude of bits ``low + (c - 1) * step``.  The ladder is at most ``binades``
    powers of two long; smaller magnitudes become its lowest rung or zero, whichever is nearer.  No
    error exceeds the value itself, so that error feedback contracts.
    """

    binades: int

    def quantise(self, b: Backend, values: Array) -> tuple[Array, Array]:
        sign, magnitude = _sign_and_magnitude(b, values)
        top = 2 * _ONE_BINADE  # below, bits are linear in the value, and halving is no subtraction
        high = b.max(b.concat([magnitude, b.constant([top], "int64", magnitude)]))
        least = -b.max(b.concat([b.where(magnitude > 0, -magnitude, -_SIGN), -b.reshape(high, [1])]))
        floor = b.max(b.constant([least, high - self.binades * _ONE_BINADE, top], "int64", magnitude))
        rungs = (1 << (self.bits - 1)) - 2  # above the lowest
        step = (high - floor + rungs - 1) // rungs
        step = b.max(b.constant([step, 1], "int64", magnitude))
        code = (magnitude - floor + b.shift_right(step, 1)) // step + 1
        below = b.cast(magnitude > floor - _ONE_BINADE, "int64")
        code = b.where(magnitude < floor, below, code)
        return b.constant([floor, step], "int32", values), sign * (1 << (self.bits - 1)) + code

    def dequantise(self, b: Backend, scales: Array, codes: Array) -> Array:
        scales = bits.from_words(b, scales)
        rung = codes & ((1 << (self.bits - 1)) - 1)
        magnitude = scales[:1] + (rung - 1) * scales[1:]
        magnitude = b.where(magnitude < _LARGEST, magnitude, _LARGEST)
        magnitude = b.where(rung > 0, magnitude, 0)
        return _from_sign_and_magnitude(b, b.shift_right(codes, self.bits - 1), magnitude)

    def codes(self, words: kernels.Words) -> tuple[list[int], kernels.Words]:
        low, step = kernels.fit_ladder(words, self.binades, (1 << (self.bits - 1)) - 2)
        return [low, step], kernels.ladder_codes(words, low, step, self.bits)

    def restored(self, scales: list[int], codes: kernels.Words) -> kernels.Words:
        return kernels.ladder_words(codes, *scales, self.bits)


class Sign(ValueKind):
    """One bit, and one float32 for all: the mean magnitude s = ||g_T||_1 / T.

    With the step 1/L this is the papers' S+Q compressor (sign and norm); among all s it has the least
    squared error.  The mean is summed in integers, so it does not depend on the order.
    """

    def quantise(self, b: Backend, values: Array) -> tuple[Array, Array]:
        sign, magnitude = _sign_and_magnitude(b, values)
        exponent = b.shift_right(magnitude, _MANTISSA)
        normal = b.cast(exponent > 0, "int64")
        exponent = exponent + 1 - normal
        mantissa = (magnitude & (_ONE_BINADE - 1)) + normal * _ONE_BINADE
        top = b.max(b.concat([exponent, b.constant([1], "int64", exponent)]))
        # Six more bits than the mantissa has; 2**31 terms below 2**30 stay below 2**61.
        drop = top - exponent
        total = b.sum(b.shift_right(mantissa * 64, b.where(drop < 62, drop, 62)))
        count = b.constant([b.length(values)], "int64", values)
        count = b.where(count > 0, count, 1)
        unit = b.bitcast(b.shift_left(b.reshape(top, [1]) + (1023 - 127 - _MANTISSA - 6), 52), "float64")
        mean = b.cast(b.reshape(total, [1]), "float64") / b.cast(count, "float64") * unit
        return b.bitcast(b.cast(mean, "float32"), "int32"), sign

    def dequantise(self, b: Backend, scales: Array, codes: Array) -> Array:
        magnitude = bits.from_words(b, scales) & (_SIGN - 1)
        return _from_sign_and_magnitude(b, codes, magnitude)

    def codes(self, words: kernels.Words) -> tuple[list[int], kernels.Words]:
        return [int(np.float32(kernels.mean_magnitude(words)).view(np.uint32))], words >> 31

    def restored(self, scales: list[int], codes: kernels.Words) -> kernels.Words:
        return codes << 31 | scales[0] & (_SIGN - 1)


class Nothing(ValueKind):
    """No values: a message that names a support.  Read back they are zeros."""

    def quantise(self, b: Backend, values: Array) -> tuple[Array, Array]:
        return b.zeros(0, "int32", values), b.zeros(b.length(values), "int64", values)

    def dequantise(self, b: Backend, scales: Array, codes: Array) -> Array:
        return b.zeros(b.length(codes), "float32", codes)

    def codes(self, words: kernels.Words) -> tuple[list[int], kernels.Words]:
        return [], np.zeros(len(words), np.uint32)

    def restored(self, scales: list[int], codes: kernels.Words) -> kernels.Words:
        return np.zeros(len(codes), np.uint32)

    def encode(self, b: Backend, values: Array) -> Array:
        return b.zeros(0, "int32", values)

    def decode(self, b: Backend, words: Array, count: Any) -> Array:
        return b.zeros(count, "float32", words)


def _sign_and_magnitude(b: Backend, values: Array) -> tuple[Array, Array]:
    """The sign bit and the other 31 bits of float32 ``values``, as int64."""
    words = b.cast(b.bitcast(values, "int32"), "int64")
    return b.shift_right(words, 31) & 1, words & (_SIGN - 1)


def _from_sign_and_magnitude(b: Backend, sign: Array, magnitude: Array) -> Array:
    return b.bitcast(b.cast(magnitude - sign * _SIGN, "int32"), "float32")


KINDS: dict[str, ValueKind] = {
    kind.name: kind
    for kind in (
        Float32("fp32", 0, 32, 0, False, "none"),
        Fitted("fp16", 1, 16, 2, True, "2**-16 of the value for each binade that the message spans", 44),
        BFloat16("bf16", 2, 16, 0, True, "2**-8 of the value"),
        Fitted("int8", 3, 8, 2, True, "2**-8 of the value for each binade that the message spans", 16),
        Fitted("int4", 4, 4, 2, True, "1/12 of the value for each binade that the message spans", 8),
        Sign("sign", 5, 1, 1, True, "the distance from the mean magnitude"),
    )
}
NOTHING = Nothing("nothing", 6, 0, 0, True, "all of the value")
"""What messages of the ring carry; nobody chooses it."""

BY_NUMBER: dict[int, ValueKind] = {kind.number: kind for kind in (*KINDS.values(), NOTHING)}


def value_kind(name: str) -> ValueKind:
    """The kind called ``name``; ConfigurationError where there is none."""
    if name == NOTHING.name:
        return NOTHING
    if name not in KINDS:
        raise ConfigurationError(f"values={name!r} is not known; choose one of {', '.join(KINDS)}")
    return KINDS[name]


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


_missing = _subclasses(ValueKind) - {ValueKind} - {type(kind) for kind in BY_NUMBER.values()}
if _missing or len(BY_NUMBER) != len(KINDS) + 1 or not all(0 <= number < 16 for number in BY_NUMBER):
    raise AssertionError(f"every kind of value needs an entry in KINDS with a number of its own: {_missing}")
