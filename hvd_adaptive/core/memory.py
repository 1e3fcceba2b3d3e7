"""What is carried over because it was not sent.

A memory is two functions on an explicit residual, a float32 array of d elements.  The residual of
:class:`ErrorFeedback` obeys, for every worker and at every step,

    sum of gradients so far = sum of what was sent so far + residual,

so nothing is lost, only late (Seide et al. 2014; Karimireddy et al. 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

from .backend import Array, Backend


@dataclass(frozen=True)
class NoMemory:
    """Forgets what is not sent.  Right for unbiased codecs and for the papers' own setting."""

    keeps = False

    def compensate(self, b: Backend, residual: Array | None, gradient: Array) -> Array:
        """What to compress: the gradient itself."""
        return gradient

    def remainder(self, b: Backend, x: Array, indices: Array, unsent: Array) -> Array | None:
        """The next residual: none."""
        return None


@dataclass(frozen=True)
class ErrorFeedback:
    """Adds what was not sent to the next gradient.

    The residual is in the unit of the gradients, before the learning rate.
    """

    keeps = True

    def compensate(self, b: Backend, residual: Array | None, gradient: Array) -> Array:
        """What to compress: gradient + residual (in the residual's storage)."""
        assert residual is not None
        return b.add_(residual, gradient)

    def remainder(self, b: Backend, x: Array, indices: Array, unsent: Array) -> Array | None:
        """The next residual: ``x`` with ``unsent`` at ``indices`` (in the storage of ``x``)."""
        return b.put_(x, indices, unsent)


Memory = NoMemory | ErrorFeedback
