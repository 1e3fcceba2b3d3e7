"""What was sent, how much of what could have been, and how long our part took."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Traffic:
    """Of one rank, over one step or over all.

    ``bits_sent``: handed to Horovod's collectives by this rank, ballots and padding included.
    ``bits_received``: of the results: the messages of the other ranks, and what an allreduce gave
    back.  ``bits_dense``: what this rank would have handed over uncompressed.  ``messages``:
    collectives started with a payload, so without those that carry ballots alone.
    ``nonfinite_steps``: steps in which some rank's gradient was not finite.  Seconds are those spent
    inside ``compress`` and ``decompress``, without waiting for other ranks.
    """

    bits_sent: int = 0
    bits_received: int = 0
    bits_dense: int = 0
    messages: int = 0
    nonfinite_steps: int = 0
    compress_seconds: float = 0.0
    decompress_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """``bits_sent / bits_dense``; 1 where nothing was sent yet."""
        return self.bits_sent / self.bits_dense if self.bits_dense else 1.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.add, _values(self), _values(other)))


_values = operator.attrgetter(*(field.name for field in dataclasses.fields(Traffic)))  # added for each tensor


@dataclass(frozen=True)
class Statistics:
    """A compressor's report; see :class:`Traffic` for ``last`` (step) and ``total``.

    ``sparsity``: T of each tensor in the last step (d where it went dense).  ``price``: improvement
    per unit of cost, or d / T where progress is the objective; all ranks hold it.  ``improvement``: of
    the last step, mean over the ranks, in squared gradient units.  ``reason``: why the next step is
    dense or sparse.
    """

    step: int = 0
    last: Traffic = Traffic()
    total: Traffic = Traffic()
    sparsity: Mapping[str, int] = field(default_factory=dict)
    price: float = 0.0
    improvement: float = 0.0
    reason: str = ""
