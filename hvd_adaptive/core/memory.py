"""What is carried over because it was not sent.

A memory is a few functions on an explicit state, a float32 array of ``width * d`` elements, of which
the first d are what a compressor shows as the residual.  In a step:

1. ``compensate``: what to compress, x, and the state, from the gradient and the state before.
2. ``note``: what must be remembered of the coordinates that are sent, from their values and from
   what the receivers decode.
3. ``remainder``, once the step is known to count: the next state.  Where everything was sent exactly
   (a dense step) these two are ``note_all`` and ``cleared``.
4. ``receive``: the gradient, from the aggregate that came back, and the state.
"""

from __future__ import annotations

import difflib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .backend import Array, Backend
from .errors import ConfigurationError


class Memory(ABC):
    """What the members of this module share."""

    width: ClassVar[int] = 1
    """Elements of the state per element of the gradient; with 0 nothing is kept."""

    small: ClassVar[bool] = False
    """Whether tensors that are too small to compress have a state too."""

    sends_parts: ClassVar[bool] = True
    """Whether what was sent, added to the state, makes it as if it had not been sent."""

    @abstractmethod
    def compensate(self, b: Backend, state: Array, gradient: Array, workers: int) -> tuple[Array, Array]:
        """x, float32[d], and the state (in its storage where that can be).  ``workers``: how many."""

    def note(self, values: Array, received: Array) -> Array:
        """Of the sent coordinates: here what the receivers lack."""
        return values - received

    def note_all(self, b: Backend, x: Array) -> tuple[Array, Array]:
        """Indices (int64) and note where x is sent as it is: here nothing needs to be known."""
        return b.zeros(0, "int64", x), b.zeros(0, "float32", x)

    @abstractmethod
    def remainder(self, b: Backend, state: Array, indices: Array, note: Array, whole: bool) -> Array:
        """The next state.  ``indices``: int64, those that were sent; ``whole``: they are all there are."""

    @abstractmethod
    def cleared(self, b: Backend, state: Array, note: Array) -> Array:
        """The next state after a step in which x was sent as it is."""

    def receive(self, b: Backend, state: Array, aggregate: Array) -> tuple[Array, Array]:
        """The gradient to apply, and the state: here the aggregate is the gradient."""
        return aggregate, state


@dataclass(frozen=True)
class ErrorFeedback(Memory):
    """Adds what was not sent to the next gradient.

    The state, the residual, obeys for every worker and at every step

        sum of gradients so far = sum of what was sent so far + residual,

    so nothing is lost, only late (Seide et al. 2014; Karimireddy et al. 2019).  It is in the unit of
    the gradients, before the learning rate.
    """

    def compensate(self, b: Backend, state: Array, gradient: Array, workers: int) -> tuple[Array, Array]:
        x = b.add_(state, gradient)
        return x, x

    def remainder(self, b: Backend, state: Array, indices: Array, note: Array, whole: bool) -> Array:
        return b.put_(state, indices, note)

    def cleared(self, b: Backend, state: Array, note: Array) -> Array:
        return b.clear_(state)


@dataclass(frozen=True)
class NoMemory(ErrorFeedback):
    """Forgets what is not sent.  Right for unbiased codecs and for the papers' own setting.

    It has no state of its own; what an earlier recipe has left is sent like error feedback, once.
    """

    width: ClassVar[int] = 0


@dataclass(frozen=True)
class MomentumCorrection(Memory):
    """Momentum on each worker, before compression (Deep Gradient Compression, Lin et al. 2018).

    With momentum m and the worker's gradient g the state (v, u) goes

        u <- m u + g,    v <- v + u,    x = v

    and where a coordinate was sent, v keeps what the receivers lack and u becomes 0 (the momentum
    factor masking of section 3.2).  Where every coordinate is sent, nothing is stale, and u stays: then
    this is momentum SGD.  Use it with an optimizer that has no momentum itself.

    ``clip``: the gradient's norm on each of N workers is clipped to ``clip / sqrt(N)`` before it is
    added (the local clipping of section 3.2), tensor by tensor.
    """

    momentum: float = 0.9
    clip: float | None = None

    width: ClassVar[int] = 2
    small: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ConfigurationError(f"momentum must be at least 0 and below 1, not {self.momentum!r}")
        if self.clip is not None and not (_is_number(self.clip) and self.clip > 0):
            raise ConfigurationError(f"clip must be None or a norm above 0, not {self.clip!r}")

    def compensate(self, b: Backend, state: Array, gradient: Array, workers: int) -> tuple[Array, Array]:
        if self.clip is not None:
            norm = b.sqrt(b.sum(gradient * gradient))
            gradient = gradient * b.minimum(
                b.constant(1.0, "float32", gradient), self.clip / math.sqrt(workers) / (norm + 1e-30)
            )
        d = int(gradient.shape[0])
        u = state[d:] * self.momentum + gradient
        v = b.add_(state[:d], u)
        return v, b.concat([v, u])

    def remainder(self, b: Backend, state: Array, indices: Array, note: Array, whole: bool) -> Array:
        if whole:
            return b.put_(state, indices, note)
        d = int(state.shape[0]) // 2
        masked = b.zeros(b.length(note), "float32", note)
        return b.put_(state, b.concat([indices, indices + d]), b.concat([note, masked]))

    def cleared(self, b: Backend, state: Array, note: Array) -> Array:
        d = int(state.shape[0]) // 2
        return b.concat([b.zeros(d, "float32", state), state[d:]])


@dataclass(frozen=True)
class EF21(Memory):
    """Compresses differences (EF21, Richtarik, Sokolov, Fatkhullin, NeurIPS 2021).

    The state is (h, g): h what the others know of this worker's gradient, g the mean of all workers'
    h, the same on every rank.  With the worker's gradient f and the compressor C

        x = f - h,    h <- h + C(x),    g <- g + mean over workers of C(x),

    and g is the gradient that is applied.  A step that does not count changes nothing.
    """

    width: ClassVar[int] = 2
    sends_parts: ClassVar[bool] = False

    def compensate(self, b: Backend, state: Array, gradient: Array, workers: int) -> tuple[Array, Array]:
        return gradient - state[: int(gradient.shape[0])], state

    def note(self, values: Array, received: Array) -> Array:
        """Here: what the receivers have."""
        return received

    def note_all(self, b: Backend, x: Array) -> tuple[Array, Array]:
        return b.arange(b.length(x), x), x

    def remainder(self, b: Backend, state: Array, indices: Array, note: Array, whole: bool) -> Array:
        return b.scatter_add_(state, indices, note)

    def cleared(self, b: Backend, state: Array, note: Array) -> Array:
        return b.scatter_add_(state, b.arange(b.length(note), note), note)

    def receive(self, b: Backend, state: Array, aggregate: Array) -> tuple[Array, Array]:
        d = int(state.shape[0]) // 2
        g = state[d:] + aggregate
        return g, b.concat([state[:d], g])


MEMORIES: Mapping[str, type[Memory]] = {
    "error_feedback": ErrorFeedback,
    "momentum": MomentumCorrection,
    "ef21": EF21,
    "none": NoMemory,
}


def named(memory: Memory | str | Mapping[str, Any]) -> Memory:
    """A memory as it is, from its name in :data:`MEMORIES`, or from ``{"kind": name, option: value}``.

    Warns where it keeps nothing.  Raises ConfigurationError naming a wrong name or option.
    """
    if not isinstance(memory, Memory):
        options = dict(memory) if isinstance(memory, Mapping) else {"kind": memory}
        kind = options.pop("kind", None)
        if not isinstance(kind, str) or kind not in MEMORIES:
            close = difflib.get_close_matches(str(kind), MEMORIES, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigurationError(f"memory must be one of {', '.join(MEMORIES)}, not {kind!r}{hint}")
        known = MEMORIES[kind].__dataclass_fields__  # type: ignore[attr-defined]
        for option in options:
            if option not in known:
                raise ConfigurationError(f"memory {kind!r} takes no option {option!r}")
        memory = MEMORIES[kind](**options)
    if not memory.width:
        warnings.warn(
            "memory='none' loses for good whatever a step does not send; training may stall", stacklevel=4
        )
    return memory


def refitted(b: Backend, old: Memory, new: Memory, state: Array, dimension: int) -> Array:
    """The state that ``old`` has left, as ``new`` goes on with it.

    Raises ConfigurationError where that would lose it.
    """
    if isinstance(old, EF21) or isinstance(new, EF21):
        if type(old) is type(new):
            return state
        raise ConfigurationError(
            "set_recipe cannot change memory to or from 'ef21': its state is an estimate of the gradient and "
            "no residual; make a new compressor instead"
        )
    held = b.length(state) // max(1, dimension)
    if new.width == 2 and held == 1:
        return b.concat([state, b.zeros(dimension, "float32", state)])
    if new.width < 2 and held == 2:
        return b.copy(state[:dimension])
    return state


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
