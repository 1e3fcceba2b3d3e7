"""Many workers in one process: what they would send each other, without a network.

Rings are summed in rank order and averaged as Horovod averages; messages stand in rank order as
an allgather leaves them.  The code between is that of the distributed run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .backend import Array, Backend
from .parcel import contents_words
from .recipe import Recipe
from .statistics import Traffic
from .worker import Worker


class Ensemble:
    """``count`` workers that train one model.

    ``b``: the backend of the gradients.  ``shapes`` maps the names of the model's tensors to
    their shapes, or numbers of elements.
    """

    def __init__(
        self, b: Backend, recipe: Recipe, shapes: Mapping[str, int | Sequence[int]], count: int
    ) -> None:
        self._b = b
        self.workers = [Worker(b, recipe, shapes) for _ in range(count)]
        for rank, worker in enumerate(self.workers):
            worker.meet(range(count), rank)
        self._first, self._later = self.workers[0].buckets(first=True), self.workers[0].buckets()

    @property
    def riding(self) -> int:
        """Values that rode the ring in the last step, where that was a sparse one."""
        return self.workers[0].riding

    def reduce(self, gradients: Sequence[Sequence[Array]]) -> list[Array]:
        """The average that every worker would hold, flat and float32, one for each tensor.

        ``gradients[r][s]``: worker r's gradient of the tensor in slot s, any shape.
        """
        return [self._reduce(slot, [own[slot] for own in gradients]) for slot in range(len(gradients[0]))]

    def _reduce(self, slot: int, gradients: Sequence[Array]) -> Array:
        b, workers = self._b, self.workers
        ways = [worker.outgoing(slot, g) for worker, g in zip(workers, gradients, strict=True)]
        sendings = [outgoing for outgoing, _ in ways]
        contexts = [context for _, context in ways]
        first = sendings[0]
        if first is None:
            flat = [b.cast(b.reshape(g, (-1,)), "float32") for g in gradients]
            bits = 32 * b.length(flat[0])
            aggregate, words = self._average(flat), [0] * len(workers)
            for worker, context in zip(workers, contexts, strict=True):
                worker.as_it_is(context, aggregate)
        else:
            ring = self._average([s.ring for s in sendings if s is not None])
            bits = 32 * b.length(ring)
            messages = None
            words = [0] * len(workers)
            if workers[0].gathers(contexts[0]):
                contents = self._contents(slot, contexts[0].control.first)
                words = [b.length(s.message) + contents for s in sendings if s is not None]
                messages = b.concat([s.message for s in sendings if s is not None])
            aggregate = workers[0].incoming(contexts[0], ring, messages)
            for worker, context in zip(workers[1:], contexts[1:], strict=True):
                worker.settle(context, ring)
                worker.learn(context, ring, messages)
        whole = 32 * b.length(aggregate)
        for worker, context, own in zip(workers, contexts, words, strict=True):
            received = bits + 32 * (sum(words) - own)
            worker.count(
                context, Traffic(bits_sent=bits + 32 * own, bits_received=received, bits_dense=whole)
            )
            worker.done(context)
        return aggregate

    def _contents(self, slot: int, first: bool) -> int:
        """The words of its parcel's contents that are to be counted with a slot."""
        buckets = self._first if first else self._later
        bucket = next(bucket for bucket in buckets if slot in bucket)
        head = contents_words(0)
        return contents_words(1) - head + (head if slot == min(bucket) else 0)

    def _average(self, rings: Sequence[Array]) -> Array:
        total = self._b.copy(rings[0])
        for ring in rings[1:]:
            total = self._b.add_(total, ring)
        return total * (1.0 / len(rings))
