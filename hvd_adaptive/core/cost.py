"""What it costs to send T of the d coordinates of a gradient.

A cost model is a frozen object that maps the sparsity T (a number, or an array of numbers,
between 0 and d; real-valued where T is an expected count) to a cost.  Only ratios of costs
matter to the tuning rule, so any unit will do as long as one model keeps to it:

================== ================================ ===============================
model              cost of T coordinates            unit
================== ================================ ===============================
`PayloadBits`      T (ceil(log2 d) + value_bits)    bits
`SignPayloadBits`  norm_bits + T (ceil(log2 d) + 1) bits
`DenseBits`        T value_bits                     bits
`Affine`           per_unit P(T) + fixed            the caller's: bits, seconds, J
`Packets`          whole packets and their headers  bytes
`LinkTime`         a collective over a link         seconds
================== ================================ ===============================

P is the payload, in bits.  Source: the payload, affine and packet models of the CAT paper
(arXiv 2003.06377).

One price over many tensors
---------------------------
Every model has an affine form ``fixed + head + T * marginal()``, which is the cost itself
where ``affine`` is true.  Over a model of many tensors that share a cost, ``fixed`` is
charged once, and tensor l of dimension d_l adds ``head + T_l * marginal()``, both read from
``cost.for_dimension(d_l)``.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigurationError

Floats = NDArray[np.float64]


class CostModel(ABC):
    """A callable from T to cost, never decreasing in T.  Units: see the module."""

    dimension: int
    """d, the number of coordinates of the tensor that this model is for."""

    unit: ClassVar[str] = "bit"
    """What a cost of 1 is, in the singular, for reports."""

    fixed: float
    """Cost of a message before its first bit; shared, where one cost covers many tensors."""

    @overload
    def __call__(self, sparsity: float) -> float: ...

    @overload
    def __call__(self, sparsity: NDArray[Any]) -> Floats: ...

    def __call__(self, sparsity: float | NDArray[Any]) -> float | Floats:
        """The cost of ``sparsity`` coordinates: a float for a number, float64 for an array.

        Raises ConfigurationError for a sparsity outside 0 .. ``dimension``.
        """
        counts = np.asarray(sparsity, dtype=np.float64)
        if counts.size and not (counts.min() >= 0 and counts.max() <= self.dimension):
            raise ConfigurationError(
                f"sparsity must lie between 0 and the dimension {self.dimension} of the cost model, "
                f"but ranges over {counts.min():g} .. {counts.max():g}"
            )
        cost = self._cost(counts)
        return cost if counts.ndim else float(cost)

    @abstractmethod
    def _cost(self, counts: Floats) -> Floats: ...

    @property
    @abstractmethod
    def head(self) -> float:
        """Cost of the part of a tensor's message that does not depend on T, such as a norm."""

    @abstractmethod
    def marginal(self, sparsity: float = 1.0) -> float:
        """Cost of one more coordinate after ``sparsity`` of them.

        ``sparsity`` matters only over a payload that is not affine.
        """

    @property
    def affine(self) -> bool:
        """Whether ``fixed + head + T * marginal()`` is the cost itself, for every T."""
        return True

    @abstractmethod
    def for_dimension(self, dimension: int) -> CostModel:
        """The same model for a tensor of ``dimension`` coordinates."""


class Payload(CostModel):
    """The length of a message, in bits.  The other models are functions of it."""

    fixed = 0.0

    @abstractmethod
    def for_dimension(self, dimension: int) -> Payload: ...


def index_bits(dimension: int) -> int:
    """ceil(log2 d): the bits of an index into ``dimension`` coordinates; 0 for d = 1."""
    return (dimension - 1).bit_length()


@dataclass(frozen=True)
class PayloadBits(Payload):
    """Bits of T pairs of index and value: ``T (ceil(log2 d) + value_bits)`` (P_S of the CAT paper).

    For stochastic sparsification T is the expected number of coordinates, and the bits are
    expected bits.

    Parameters
    ----------
    dimension: d, the number of coordinates of the tensor.
    value_bits: bits of one value.
    """

    dimension: int
    value_bits: float = 32

    def __post_init__(self) -> None:
        _whole(self, "dimension", at_least=1)
        _number(self, "value_bits", positive=True)

    def _cost(self, counts: Floats) -> Floats:
        return counts * self.marginal()

    @property
    def head(self) -> float:
        return 0.0

    def marginal(self, sparsity: float = 1.0) -> float:
        return float(index_bits(self.dimension) + self.value_bits)

    def for_dimension(self, dimension: int) -> PayloadBits:
        return dataclasses.replace(self, dimension=dimension)


@dataclass(frozen=True)
class SignPayloadBits(Payload):
    """Bits of one norm and T pairs of index and sign: ``norm_bits + T (ceil(log2 d) + 1)``.

    Parameters
    ----------
    dimension: d, the number of coordinates of the tensor.
    norm_bits: bits of the one number that scales the signs.
    """

    dimension: int
    norm_bits: float = 32

    def __post_init__(self) -> None:
        _whole(self, "dimension", at_least=1)
        _number(self, "norm_bits")

    def _cost(self, counts: Floats) -> Floats:
        return self.norm_bits + counts * self.marginal()

    @property
    def head(self) -> float:
        return float(self.norm_bits)

    def marginal(self, sparsity: float = 1.0) -> float:
        return float(index_bits(self.dimension) + 1)

    def for_dimension(self, dimension: int) -> SignPayloadBits:
        return dataclasses.replace(self, dimension=dimension)


@dataclass(frozen=True)
class DenseBits(Payload):
    """Bits of T values without an index: ``T value_bits``, as where the support is known or all.

    Parameters
    ----------
    dimension: d, the number of coordinates of the tensor.
    value_bits: bits of one value.
    """

    dimension: int
    value_bits: float = 32

    def __post_init__(self) -> None:
        _whole(self, "dimension", at_least=1)
        _number(self, "value_bits", positive=True)

    def _cost(self, counts: Floats) -> Floats:
        return counts * self.marginal()

    @property
    def head(self) -> float:
        return 0.0

    def marginal(self, sparsity: float = 1.0) -> float:
        return float(self.value_bits)

    def for_dimension(self, dimension: int) -> DenseBits:
        return dataclasses.replace(self, dimension=dimension)


_Self = TypeVar("_Self", bound="PayloadCost")


class PayloadCost(CostModel):
    """A cost that is a function of the payload's bits."""

    payload: Payload

    @property
    def dimension(self) -> int:  # type: ignore[override]  # the payload's, and read-only
        return self.payload.dimension

    @property
    def affine(self) -> bool:
        return self.payload.affine

    @property
    @abstractmethod
    def per_bit(self) -> float:
        """Cost of one more bit of payload."""

    @property
    def head(self) -> float:
        return self.per_bit * self.payload.head

    def marginal(self, sparsity: float = 1.0) -> float:
        return self.per_bit * self.payload.marginal(sparsity)

    def _cost(self, counts: Floats) -> Floats:
        return self.fixed + self.per_bit * self.payload._cost(counts)

    def with_payload(self: _Self, payload: Payload) -> _Self:
        """The same model over another payload, such as that of another codec."""
        return dataclasses.replace(self, payload=payload)  # type: ignore[type-var]

    def for_dimension(self: _Self, dimension: int) -> _Self:
        return self.with_payload(self.payload.for_dimension(dimension))


@dataclass(frozen=True)
class Affine(PayloadCost):
    """``per_unit * payload + fixed``: so much a bit and so much a message (seconds, joules, ...).

    Parameters
    ----------
    payload: the length of the message, in bits.
    per_unit: cost of one bit of payload (c1 of the CAT paper).
    fixed: cost of a message before its first bit (c0), in the same unit.
    """

    unit: ClassVar[str] = "unit"

    payload: Payload
    per_unit: float
    fixed: float

    def __post_init__(self) -> None:
        _payload(self)
        _number(self, "per_unit")
        _number(self, "fixed")
        if self.per_unit == 0 and self.fixed == 0:
            raise ConfigurationError("Affine: per_unit and fixed are both 0; make one of them positive")

    @property
    def per_bit(self) -> float:
        return float(self.per_unit)


@dataclass(frozen=True)
class Packets(PayloadCost):
    """Bytes on a network that sends whole packets.

    ``(packet_bytes + header_bytes) * ceil(payload / (8 packet_bytes)) + message_bytes``:
    a packet costs its full size however little it carries, and a message costs ``message_bytes``
    once (c1 = 576, c0 = 64 with the defaults; Ethernet with TCP is about 1460, 78, 0).

    The affine form is the lower bound without rounding up; the cost exceeds it by less than
    one packet, so over a message of many packets it is nearly the cost.

    Parameters
    ----------
    payload: the length of the message, in bits.
    packet_bytes: payload that one packet carries, in bytes.
    header_bytes: further bytes that each packet costs.
    message_bytes: further bytes that each message costs.
    """

    unit: ClassVar[str] = "byte"

    payload: Payload
    packet_bytes: int = 512
    header_bytes: float = 64
    message_bytes: float = 64

    def __post_init__(self) -> None:
        _payload(self)
        _whole(self, "packet_bytes", at_least=1)
        _number(self, "header_bytes")
        _number(self, "message_bytes")

    @property
    def fixed(self) -> float:  # type: ignore[override]
        return float(self.message_bytes)

    @property
    def affine(self) -> bool:
        return False

    @property
    def per_bit(self) -> float:
        return (self.packet_bytes + self.header_bytes) / (8 * self.packet_bytes)

    def _cost(self, counts: Floats) -> Floats:
        return self._packets(counts) * (self.packet_bytes + self.header_bytes) + self.message_bytes

    def _packets(self, counts: Floats) -> Floats:
        return np.ceil(self.payload._cost(counts) / (8 * self.packet_bytes))

    def full(self) -> Floats:
        """The largest T that each number of packets carries, ascending, ending with d.

        Real-valued; shape ``(m,)`` where m is the number of packets of the dense message, less
        those numbers of packets that carry no coordinate.  Needs an affine payload.

        Raises ConfigurationError over a payload that is not affine.
        """
        if not self.payload.affine:
            raise ConfigurationError("Packets.full needs a payload that is affine in the sparsity")
        everything = np.asarray(float(self.dimension))
        packets = np.arange(1.0, float(self._packets(everything)))
        counts = (packets * 8 * self.packet_bytes - self.payload.head) / self.payload.marginal()
        # The division may have rounded up, past the packet's last bit.
        counts = np.where(self._packets(counts) > packets, np.nextafter(counts, 0.0), counts)
        return np.append(counts[counts > 0], everything)


@dataclass(frozen=True)
class LinkTime(PayloadCost):
    """Seconds of a step whose message goes through a ring collective.

    * ``"allgather"``: each worker receives the messages of the n - 1 others, one per hop:
      ``(n - 1) (latency + payload / bandwidth)``.  It grows with the world size.
    * ``"allreduce"``: reduce-scatter and allgather of n-ths of one message:
      ``2 (n - 1) latency + 2 (n - 1)/n payload / bandwidth``.

    ``compute`` is added to either.  With one worker nothing is sent and only ``compute`` remains.

    Parameters
    ----------
    payload: the length of one worker's message, in bits.
    bandwidth: of a worker's link, in bits per second.
    latency: of one hop, in seconds.
    compute: time of a step without communication, in seconds.
    world_size: n, the number of workers.
    collective: ``"allgather"`` or ``"allreduce"``.
    ring_bandwidth, ring_latency: those of an allreduce, where they were measured apart from an
        allgather's.
    """

    unit: ClassVar[str] = "second"

    payload: Payload
    bandwidth: float
    latency: float = 0.0
    compute: float = 0.0
    world_size: int = 2
    collective: str = "allgather"
    ring_bandwidth: float | None = None
    ring_latency: float | None = None

    def __post_init__(self) -> None:
        _payload(self)
        _number(self, "bandwidth", positive=True)
        _number(self, "latency")
        if self.ring_bandwidth is not None:
            _number(self, "ring_bandwidth", positive=True)
        if self.ring_latency is not None:
            _number(self, "ring_latency")
        _number(self, "compute")
        _whole(self, "world_size", at_least=1)
        if self.collective not in ("allgather", "allreduce"):
            raise ConfigurationError(
                f"LinkTime: collective must be 'allgather' or 'allreduce', not {self.collective!r}"
            )
        if self.world_size == 1 and self.compute == 0:
            raise ConfigurationError(
                "LinkTime: world_size=1 sends nothing, so compute must be positive for a cost to remain"
            )

    @property
    def hops(self) -> int:
        """Messages that follow one another in the collective."""
        return (self.world_size - 1) * (1 if self.collective == "allgather" else 2)

    @property
    def fixed(self) -> float:  # type: ignore[override]
        return self.compute + self.hops * self.latency

    @property
    def per_bit(self) -> float:
        share = 1.0 if self.collective == "allgather" else 1.0 / self.world_size
        return self.hops * share / self.bandwidth

    def ring(self, payload: Payload) -> LinkTime:
        """The cost of a step whose ``payload`` goes through an allreduce over the same link."""
        return dataclasses.replace(
            self,
            payload=payload,
            collective="allreduce",
            bandwidth=self.bandwidth if self.ring_bandwidth is None else self.ring_bandwidth,
            latency=self.latency if self.ring_latency is None else self.ring_latency,
        )


def _payload(model: PayloadCost) -> None:
    if not isinstance(model.payload, Payload):
        raise ConfigurationError(
            f"{type(model).__name__}: payload must be a payload in bits, such as PayloadBits(dimension) "
            f"or SignPayloadBits(dimension), not {model.payload!r}"
        )


def _whole(model: CostModel, field: str, at_least: int) -> None:
    value = getattr(model, field)
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < at_least:
        raise ConfigurationError(
            f"{type(model).__name__}: {field} must be a whole number of at least {at_least}, not {value!r}"
        )
    object.__setattr__(model, field, int(value))  # NumPy integers lack bit_length


def _number(model: CostModel, field: str, positive: bool = False) -> None:
    value = getattr(model, field)
    good = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if not (good and (value > 0 if positive else value >= 0)):
        what = "positive" if positive else "zero or more"
        raise ConfigurationError(
            f"{type(model).__name__}: {field} must be a finite number, {what}, not {value!r}"
        )
