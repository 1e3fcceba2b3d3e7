"""Two levels for hosts with several ranks: dense inside a host, compressed between hosts.

    hvd.init(process_sets="dynamic")
    compression = Hierarchical("topk", model.trainable_variables, ratio=0.01)
    tape = hvd.DistributedGradientTape(tape, compression=compression, process_set=compression.inside)

Horovod reduces each gradient densely over the ranks of the host; then one rank of each host, the speaker of
:mod:`hvd_adaptive.core.hierarchy`, compresses it with the speakers of the other hosts, and tells the result
to its host.  All of that is in the graph, gradient by gradient, beside the backward pass.

Horovod's tape takes the names of its collectives from the graph, and TensorFlow numbers what it inlines, so
that ranks whose graphs differ would wait for each other for ever.  Hence every rank has the graph of every
speaker, and a variable, not the graph, says which of them it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import tensorflow as tf

from .. import process_sets
from ..core import plans
from ..core.errors import ConfigurationError, UnknownTensorError
from ..core.hierarchy import Hierarchy, speakers
from ..core.recipe import Recipe, given
from ..core.statistics import Statistics
from .backend import TENSORFLOW
from .compressor import Compressor, described
from .graphs import Counter, outside, refuse_xla
from .horovod import load


class _Ticket(NamedTuple):
    """What ``compress`` hands to ``decompress`` through Horovod."""

    position: int
    dtype: Any


class Hierarchical(tf.Module):
    """Compresses between hosts what their ranks have reduced densely.

    Pass it as ``compression=`` to ``hvd.DistributedGradientTape``, ``hvd.DistributedOptimizer`` or
    :func:`hvd_adaptive.keras.DistributedOptimizer`, and its ``inside`` as ``process_set=``.

    Every rank must make it, at the same place in the program, outside of any function, after
    ``hvd.init(process_sets="dynamic")``.  Every variable must get a dense gradient in every step.
    Each rank uses the residuals of the tensors that it speaks for; it has variables for all.  They are saved
    by ``tf.train.Checkpoint(compressor=...)``: every rank saves its own.

    Raises ConfigurationError for one rank per host, unequal numbers of ranks, another ``op``, a graph of
    TensorFlow 1, and where Horovod was started without dynamic process sets.

    Parameters
    ----------
    recipe: a :class:`~hvd_adaptive.core.recipe.Recipe`, or the name of one, with its ``options``.
    variables: the model's trainable variables, in the order in which gradients are asked for.
    overrides: as for :class:`~hvd_adaptive.tensorflow.Compressor`.
    op: the tape's or optimizer's: ``hvd.Average`` (the default) or ``hvd.Sum``.
    name: tells apart the collectives of several, where ranks do not make them in the same order.
    """

    def __init__(
        self,
        recipe: Recipe | str,
        variables: Iterable[Any],
        *,
        overrides: Mapping[str, Any] | None = None,
        op: Any = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name="hierarchical")
        hvd = load()
        if not tf.executing_eagerly():
            raise ConfigurationError(
                "make Hierarchical outside of any function; graphs of TensorFlow 1 are not supported"
            )
        self._op = hvd.Average if op is None else op
        if self._op not in (hvd.Average, hvd.Sum):
            raise ConfigurationError(f"op={op} must be hvd.Average or hvd.Sum, the tape's own")
        variables = list(variables)
        shapes = dict(described(variables))
        choice = plans.gathering(plans.choose(given(recipe, options), overrides, list(shapes)))
        self._tag = plans.tag(name)
        local_ranks = hvd.allgather(tf.constant([hvd.local_rank()]), name=f"{self._tag}.hosts").numpy()
        self.hierarchy = Hierarchy.of(local_ranks.tolist())
        self.inside = process_sets.own("tensorflow", self.hierarchy.inside)
        self.across = process_sets.own("tensorflow", self.hierarchy.across)
        host, position = self.hierarchy.place(hvd.rank())
        chosen = speakers({n: s.num_elements() for n, s in shapes.items()}, self.hierarchy.ranks_per_host)
        between = []
        for speaker in range(self.hierarchy.ranks_per_host):
            spoken = [v for v, who in zip(variables, chosen.values(), strict=True) if who == speaker]
            between.append(
                Compressor(
                    choice.recipe,
                    spoken,
                    overrides=choice.overriding([label for label, _ in described(spoken)]),
                    process_set=self.across,  # of the speaker too, where it is this rank
                    name=f"{self._tag}.between.{speaker}",
                )
                if spoken
                else None
            )
        self._between = tuple(between)
        self._position = tf.Variable(position, trainable=False, name="position")
        self._seen = tf.Variable(0, trainable=False, name="seen")
        self._calls = Counter()
        # TensorFlow saves what hangs on a module in lists, dictionaries and variables; this it does not.
        self._own = SimpleNamespace(
            shapes=list(shapes.items()),
            speakers=list(chosen.values()),
            roots=[self.hierarchy.hosts[host][speaker] for speaker in chosen.values()],
            mine=self._between[position],
            seen=0,
        )
        process_sets.leave_together("tensorflow", _meet)

    # -- Horovod's interface

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """The gradient itself, for the dense reduction inside the host.

        Called while a graph is made.  Raises ConfigurationError outside of a graph and under XLA;
        UnknownTensorError for a gradient that is not that of the variable in its place.
        """
        refuse_xla()
        position = self._calls.next()
        expected = self._own.shapes[position : position + 1]
        if [shape for _, shape in expected] != [tensor.shape]:
            raise UnknownTensorError(
                f"gradient {position} of shape {tensor.shape} is not that of {expected or 'any variable'}: "
                f"{_EVERY_VARIABLE}"
            )
        if not tensor.dtype.is_floating:
            raise ConfigurationError(
                f"gradient {position} is of {tensor.dtype.name}; only floats are compressed"
            )
        if position == self._own.seen:
            self._own.seen += 1
            outside(lambda: self._seen.assign(self._own.seen))
        # Horovod's allreduce knows no bfloat16; of the name it makes that of its operation.
        dense = tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor
        return tf.identity(dense, name=f"inside_{position}"), _Ticket(position, tensor.dtype)

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """The gradient reduced over all hosts, in the dtype of the one that was compressed."""
        hvd, position = load(), ctx.position
        self._check(tensor.op)
        # when a graph runs, its gradients have all been seen
        complete = tf.equal(self._seen, len(self._own.shapes))
        reduced = tf.cast(TENSORFLOW.check(complete, _NOT_ALL, tensor), ctx.dtype)
        if len(self.hierarchy.hosts) == 1:
            return reduced
        between = self._between[self._own.speakers[position]]
        assert between is not None

        def speak() -> Any:
            ring, ticket = between.compress(reduced)
            ring = hvd.allreduce(
                ring,
                op=self._op,
                # hvd.elastic.run tells Horovod's failures from others by the first word.
                name=f"HorovodAllreduce.{self._tag}.between.{position}",
                ignore_name_scope=True,
                process_set=self.across,
            )
            return between.decompress(ring, ticket)

        speaks = tf.equal(self._position, self._own.speakers[position])
        told = tf.cond(speaks, speak, lambda: tf.identity(reduced))
        wire = tf.bitcast(told, tf.uint16) if told.dtype == tf.bfloat16 else told
        wire = hvd.broadcast(
            wire,
            root_rank=self._own.roots[position],
            name=f"HorovodBroadcast.{self._tag}.told.{position}",
            ignore_name_scope=True,
            process_set=self.inside,
        )
        return tf.ensure_shape(tf.bitcast(wire, told.dtype), reduced.shape)

    def _check(self, reduction: Any) -> None:
        """Raises ConfigurationError where Horovod reduces in another way than we do."""
        if reduction.type == "HorovodGroupedAllreduce":
            raise ConfigurationError(
                "groups= works only in process sets that have rank 0: leave it out in hierarchical mode"
            )
        if reduction.get_attr("process_set_id") != self.inside.process_set_id:
            raise ConfigurationError("give Horovod's tape or optimizer process_set=compression.inside")
        if reduction.get_attr("reduce_op") != self._op:
            raise ConfigurationError("give Hierarchical the op= that Horovod's tape or optimizer has")

    # -- reports

    def statistics(self) -> Statistics | None:
        """What this rank sent between hosts; None where it speaks for no tensor."""
        return None if self._own.mine is None else self._own.mine.statistics()

    def residuals(self) -> dict[str, Any]:
        """The residuals of the tensors that this rank speaks for."""
        return {} if self._own.mine is None else self._own.mine.residuals()


_EVERY_VARIABLE = (
    "hierarchical mode needs a dense gradient of every variable that it was given, in their order.  Give it "
    "those that are trained, and turn sparse gradients (of embeddings) into dense ones with "
    "sparse_as_dense=True"
)
_NOT_ALL = f"not every variable had a dense gradient: {_EVERY_VARIABLE}"


def _meet() -> None:
    load().allreduce(tf.zeros([1]), name="hvd_adaptive.hierarchical.done")
