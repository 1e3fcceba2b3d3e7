"""The object behind ``compression=`` of Horovod's TensorFlow and Keras optimizers and tapes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ..core import ballot, course, pipeline, plans
from ..core.errors import ConfigurationError, SettingsMismatchError, UnknownTensorError
from ..core.form import Trial
from ..core.link import measured
from ..core.policy import Control
from ..core.recipe import Recipe, restate
from ..core.statistics import Statistics, Traffic
from ..core.timing import KEPT, Wholes
from .backend import TENSORFLOW
from .graphs import Counter, call, outside, refuse_xla
from .horovod import load
from .link import Collectives
from .state import CAPACITY, TRAFFIC, Board, Slot, check_capacity

_ROW = (
    *("tag", "tuned"),
    *course.Totals._fields,
    *("nonfinite", "bad_steps", "price", "dense", "until", "everything", "began", "took", "before", "ended"),
)
_WHOLES = len(_ROW)  # where what whole steps take begins
_RECENT = _WHOLES + len(Wholes._fields)
_WIDTH = _RECENT + KEPT


class _Start(NamedTuple):
    """What a step begins with, from the rows of the step before: float64 scalars; ``wholes`` and
    ``recent``: times."""

    price: Any
    dense: Any
    until: Any
    everything: Any
    bad_steps: Any
    before: Any
    compute: Any
    wholes: Any
    recent: Any


class _Ticket(NamedTuple):
    """What ``compress`` hands to ``decompress`` through Horovod."""

    position: int
    shape: Any
    dtype: Any
    step: Any
    counts: dict[str, Any]
    sparse: _Sparse | None


class _Sparse(NamedTuple):
    """The part of a ticket that tensors have which do not go dense."""

    start: _Start
    pending: pipeline.Pending
    residual: Any
    gathered: Any
    own: Any
    began: Any
    took: Any


class Compressor(tf.Module):
    """Compresses the gradients of one model for ``horovod.tensorflow``.

    Made by :class:`hvd_adaptive.tensorflow.Compression`; pass it as ``compression=`` to
    ``hvd.DistributedGradientTape``, ``hvd.DistributedOptimizer`` or
    :func:`hvd_adaptive.keras.DistributedOptimizer`.  A gradient is known by its place in the order
    in which a function hands gradients over, so every model needs a compressor of its own.  Its
    variables, among them one residual per gradient that belongs to this rank alone, are
    saved by ``tf.train.Checkpoint(compressor=...)``: every rank saves its own.

    Parameters
    ----------
    recipe: a :class:`~hvd_adaptive.core.recipe.Recipe`, a recipe's name, or a mapping as for
        :func:`~hvd_adaptive.core.recipe.from_config`.
    variables: the model's trainable variables, for names in :meth:`statistics` and a check of shapes.
    overrides: recipes for the variables whose names match a pattern, ``{"embedding*": "none"}``; needs
        ``variables``.
    process_set: the process set that the gradients are reduced over; all ranks by default.
    name: tells compressors apart in the names of collectives, where the ranks do not make their
        compressors in the same order.
    """

    def __init__(
        self,
        recipe: Recipe | str | Mapping[str, Any],
        variables: Iterable[Any] | None = None,
        *,
        overrides: Mapping[str, Any] | None = None,
        process_set: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name="compressor")
        expected = None if variables is None else described(variables)
        if overrides and expected is None:
            raise ConfigurationError("overrides go by names; pass variables=model.trainable_variables too")
        labels = [label for label, _ in expected or []]
        self._choice = plans.gathering(plans.choose(recipe, overrides, labels))
        self._tag = plans.tag(name)
        self._process_set = process_set
        self._calls = Counter()
        # TensorFlow saves what hangs on a module in lists, dictionaries and variables; this it does not.
        self._own = SimpleNamespace(
            ranks=[], link=None, functions={}, aliases=[], facts=None, joined={}, expected=expected
        )
        self.slots: list[Slot] = []
        self.board: Board | None = None

    # -- Horovod's interface

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """What Horovod allreduces in place of ``tensor``, and the context for :meth:`decompress`.

        Called while a graph is made.  Raises ConfigurationError outside of a graph, under XLA, and
        outside of the process set; SettingsMismatchError, on every rank, where the ranks were given
        different settings; UnknownTensorError for a gradient that is not the one that stood in this
        place before.
        """
        refuse_xla()
        position = self._calls.next()
        self._meet()
        slot = self._slot(position, tensor)
        step = tf.cast(slot.record[0], tf.int64)
        bits = 8 * tensor.dtype.size * slot.dimension
        recipe = self._of(slot)
        if recipe.leaves(slot.dimension):
            # Horovod's allreduce knows no bfloat16.
            ring = tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tf.identity(tensor)
            sent, messages, took, sparse = _bits(ring), 1.0, 0.0, None
        else:
            tensor, began = _timed(tensor)
            start = self._start(position, step)
            residual = None if slot.residual is None else slot.residual.read_value()
            outgoing, pending, residual = self._once(
                self._out, slot, tensor, residual, step, start, slot.known(), self._own.facts[0]
            )
            with tf.control_dependencies([outgoing.ring, outgoing.message]):
                took = tf.timestamp() - began
            # The ring's name becomes that of Horovod's operation, which must be unique.
            ring = tf.identity(outgoing.ring, name=f"ballot_{position}")
            sent = _bits(ring)
            messages = tf.cast(tf.size(ring) > ballot.SIZE, tf.float64)
            gathered, own = None, tf.constant(0.0, tf.float64)
            if not (recipe.shared or recipe.spares(slot.dimension)):
                own = _bits(outgoing.message)
                sent += own
                messages += tf.cast(own > 0, tf.float64)
                gathered = load().allgather(
                    outgoing.message,
                    # hvd.elastic.run tells Horovod's failures from others by the first word.
                    name=f"HorovodAllgather.{self._tag}.{position}",
                    ignore_name_scope=True,
                    process_set=self._ranks_together(),
                )
            sparse = _Sparse(start, pending, residual, gathered, own, began, took)
        counts = {
            "bits_sent": sent,
            "bits_dense": float(bits),
            "messages": messages,
            "compress_seconds": took,
        }
        return ring, _Ticket(position, tensor.shape, tensor.dtype, step, counts, sparse)

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """The aggregated gradient, in the shape and dtype of the one that was compressed."""
        slot = self.slots[ctx.position]
        counts = {**ctx.counts, "bits_received": _bits(tensor)}
        writes = []
        if ctx.sparse is None:
            aggregate, sparsity = tensor, float(slot.dimension)
        else:
            sparse = ctx.sparse
            (tensor, gathered), began = _timed((tensor, sparse.gathered))
            aggregate, residual, known, said = self._once(
                self._back,
                slot,
                tensor,
                gathered,
                sparse.pending,
                sparse.residual,
                ctx.step,
                sparse.start,
                slot.known(),
            )
            if slot.residual is not None:
                writes.append(slot.residual.assign(residual, read_value=False))
            if slot.directions is not None:
                writes.append(slot.directions.assign(known[0], read_value=False))
                writes.append(slot.trial.assign(known[1], read_value=False))
            with tf.control_dependencies([aggregate]):
                ended = tf.timestamp()
            row = {
                **sparse.start._asdict(),
                **said,
                "began": sparse.began,
                "took": sparse.took,
                "ended": ended,
            }
            writes.append(self._write(ctx.position, ctx.step, row))
            if sparse.gathered is not None:
                counts["bits_received"] += _bits(sparse.gathered) - sparse.own
            counts.update(nonfinite_steps=said["nonfinite"], decompress_seconds=ended - began)
            sparsity = sparse.pending.sparsity
        writes.append(_recorded(slot, ctx.step, sparsity, counts))
        with tf.control_dependencies(writes):
            return tf.reshape(tf.cast(aggregate, ctx.dtype), ctx.shape)

    # -- the parts that are traced once for all tensors of a size, and called in every trace

    def _once(self, function: Any, slot: Slot | None, *arguments: Any) -> Any:
        recipe, dimension = (None, None) if slot is None else (self._of(slot), slot.dimension)
        key = function.__name__, recipe, dimension
        if key not in self._own.functions:
            fixed = functools.partial(function, recipe, dimension)
            self._own.functions[key] = tf.function(fixed, autograph=False)
        return call(self._own.functions[key], *arguments)

    def _head(self, recipe: None, dimension: None, rows: Any, step: Any, ring: Any) -> _Start:
        """How a step starts, from the ``rows`` of the one before and the cost of a dense ring."""
        columns = {name: rows[:, i] for i, name in enumerate(_ROW)}
        live = tf.equal(columns["tag"], tf.cast(step, tf.float64))

        def common(name: str) -> Any:  # what all live rows hold alike, or the greatest; 0 without any
            return tf.reduce_max(tf.concat([tf.where(live, columns[name], 0.0), [0.0]], 0))

        bad_steps = common("bad_steps") + common("nonfinite")
        zero, recent = tf.constant(0.0, tf.float64), tf.zeros([KEPT], tf.float64)
        if not self._tuned:
            wholes = tf.zeros([len(Wholes._fields)], tf.float64)
            return _Start(zero, zero, zero, zero, bad_steps, zero, zero, wholes, recent)
        tuned = restate(self._tuned[0][0], 1, len(self._own.ranks), self._own.link).adaptive
        assert tuned is not None
        counted = live & (columns["tuned"] > 0)
        totals = course.Totals(
            *(tf.reduce_sum(tf.where(counted, columns[name], 0.0)) for name in course.Totals._fields)
        )
        heading = course.Heading(
            tf.cast(step - 1, tf.float64), common("price"), common("dense"), common("until")
        )
        heading, everything = course.follow(TENSORFLOW, tuned, ring, heading, totals)
        began, took = (
            tf.concat([tf.where(live, columns[name], 0.0), [0.0]], 0) for name in ("began", "took")
        )
        kept = tf.reduce_max(
            tf.concat([tf.where(live[:, tf.newaxis], rows, 0.0), tf.zeros([1, _WIDTH], tf.float64)], 0),
            axis=0,
        )
        recent = _recent(kept[_RECENT:], began, took, common("before"))
        compute = _median(recent) if tuned.measure else zero
        whole = tf.where(common("before") > 0, common("ended") - common("before"), 0.0)
        wholes = Wholes(*tf.unstack(kept[_WHOLES:_RECENT])).after(TENSORFLOW, whole, common("dense") > 0)
        _, price, dense, until = heading
        return _Start(
            price, dense, until, everything, bad_steps, common("ended"), compute, tf.stack(wholes), recent
        )

    def _of(self, slot: Slot) -> Recipe:
        return self._choice.of(slot.label, slot.shape)

    def _out(
        self,
        recipe: Recipe,
        dimension: int,
        tensor: Any,
        residual: Any,
        step: Any,
        start: _Start,
        known: Any,
        total: Any,
    ) -> Any:
        plan, control = self._plan(recipe, dimension, total), _control(recipe, step, start, known)
        return pipeline.compress(TENSORFLOW, plan, control, tensor, residual)

    def _back(
        self,
        recipe: Recipe,
        dimension: int,
        ring: Any,
        gathered: Any,
        pending: pipeline.Pending,
        residual: Any,
        step: Any,
        start: _Start,
        known: Any,
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        """The aggregate, the residual, what is known of directions, and what the ballots say, once they are
        known to agree."""
        plan, control = self._plan(recipe, dimension, 1), _control(recipe, step, start, known)
        ranks, phase = self._own.ranks, pipeline.phase(control)
        tally = ballot.read(TENSORFLOW, ring, ranks, plan.fingerprint, phase)
        for holds, message in (
            (tally.same_members, _other_members(ranks)),
            (tally.same_settings, self._other_settings()),
            (tally.same_phase, _OTHER_STEP),
        ):
            ring = TENSORFLOW.check(holds, message, ring)
        aggregate, residual = pipeline.decompress(
            TENSORFLOW, plan, control, pipeline.Incoming(ring, gathered), pending, residual
        )
        if known is not None:
            directions, trial = pipeline.learnt(TENSORFLOW, plan, control, ring, tally)
            known = directions, tf.stack([tf.cast(x, tf.float64) for x in trial])
        bad = tf.cast(tally.nonfinite, tf.float64)
        said = {name: getattr(tally, name) * (1 - bad) for name in course.Totals._fields}
        tuned = tf.constant(float(recipe.adaptive is not None and not recipe.spares(dimension)), tf.float64)
        return aggregate, residual, known, {**said, "nonfinite": bad, "tuned": tuned}

    def _plan(self, recipe: Recipe, dimension: int, total: Any) -> pipeline.Plan:
        count = len(self._own.ranks)
        share, restated = dimension / total, restate(recipe, dimension, count, self._own.link)
        return pipeline.Plan("", dimension, share, restated, count, load().rank(), self._choice.fingerprint)

    # -- the rows of the board

    def _start(self, position: int, step: Any) -> _Start:
        assert self.board is not None
        rows = self.board.read(self._own.aliases[position], step - 1, self._own.facts[2])
        return self._once(self._head, None, rows, step, self._own.facts[1])

    def _write(self, position: int, step: Any, row: Mapping[str, Any]) -> Any:
        assert self.board is not None
        row = {"tag": step + 1, **row}
        values = tf.stack([tf.cast(row[name], tf.float64) for name in _ROW])
        alias = self._own.aliases[position]
        return self.board.write(alias, step, position, tf.concat([values, row["wholes"], row["recent"]], 0))

    # -- who takes part, and what is known of the model

    def _ranks_together(self) -> Any:
        return self._process_set or load().global_process_set

    def _meet(self) -> None:
        """At the first gradient: who takes part, and whether all were given the same settings."""
        if self._own.ranks:
            return
        hvd, together = load(), self._ranks_together()
        if not together.included():
            raise ConfigurationError(
                f"rank {hvd.rank()} is not in the process set that this compressor was given; give "
                "the compressor and Horovod's optimizer or tape the same process_set="
            )
        self._own.ranks = list(together.ranks) if together.process_set_id else list(range(hvd.size()))
        with tf.init_scope():
            if not tf.executing_eagerly():
                return  # in a graph of TensorFlow 1 the ballots find it out
            mine = tf.constant([self._choice.fingerprint], tf.int64)
            all_settings = hvd.allgather(mine, name=f"{self._tag}.settings", process_set=together)
        if len(set(all_settings.numpy().tolist())) > 1:
            raise SettingsMismatchError(self._other_settings())
        if self._choice.auto:
            with tf.init_scope():
                self._own.link = measured(self._own.ranks, Collectives(together))
        if self.board is not None:  # others took part before
            with tf.init_scope():
                self._own.facts.assign(self._known())

    def _other_settings(self) -> str:
        return (
            "the ranks compress with different settings; give every rank the same recipe and options "
            f"(rank {load().rank()} has {self._choice.recipe} and overrides {self._choice.overrides})"
        )

    def _slot(self, position: int, tensor: Any) -> Slot:
        dimension = tensor.shape.num_elements()
        if dimension is None:
            raise ConfigurationError(
                f"gradient {position} has the shape {tensor.shape}; compression needs shapes that are "
                "known when the function is traced"
            )
        if not tensor.dtype.is_floating:
            raise ConfigurationError(
                f"gradient {position} is of {tensor.dtype.name}; only floats are compressed"
            )
        if position == len(self.slots):
            self._add(position, tuple(tensor.shape), self._label(position, tensor.shape))
        slot = self.slots[position]
        if slot.dimension != dimension:
            raise UnknownTensorError(
                f"gradient {position} has {dimension} elements where {slot.label!r} with {slot.dimension} "
                "stood before; give every model, and every set of trainable variables, a compressor of its "
                "own"
            )
        return slot

    def _label(self, position: int, shape: Any) -> str:
        """The name of the next variable of that shape; those between have no dense gradient."""
        if self._own.expected is None:
            return str(position)
        while self._own.expected:
            name, expected = self._own.expected.pop(0)
            if expected == shape:
                return name
        raise UnknownTensorError(
            f"gradient {position} of shape {shape} belongs to none of the variables= that this compressor "
            "was given, in their order; pass model.trainable_variables of the model that is trained"
        )

    def _add(self, position: int, shape: tuple[int, ...], label: str) -> None:
        check_capacity(position)
        own = self._own

        def make() -> None:
            if self.board is None:
                self.board = Board(_WIDTH)
                own.facts = self._facts()
            self.slots.append(Slot(self._choice.of(label, shape), shape, label))
            own.aliases.append(self.board.alias())
            if own.joined:
                self._join(position)
            if tf.executing_eagerly():
                own.facts.assign(self._known())

        outside(make)

    @property
    def _tuned(self) -> list[tuple[Recipe, int]]:
        """Recipe and dimension of the tensors for which the price is made."""
        pairs = [(self._of(slot), slot.dimension) for slot in self.slots]
        return [(r, d) for r, d in pairs if r.adaptive is not None and not r.spares(d)]

    def _known(self) -> Any:
        """The coordinates of the tuned tensors, the cost of a dense ring for them; all gradients."""
        total, ring = 1, float("inf")
        if self._tuned:
            total = sum(d for _, d in self._tuned)
            tuned = restate(self._tuned[0][0], total, len(self._own.ranks), self._own.link).adaptive
            assert tuned is not None
            ring = course.ring_cost(tuned, total)
        return np.array([total, ring, len(self.slots)], np.float64)

    def _facts(self) -> Any:
        """What :meth:`_known` says, as a variable."""
        if tf.executing_eagerly():
            return tf.Variable(np.zeros(3), trainable=False)

        def late() -> Any:  # a graph of TensorFlow 1 is complete before its variables are initialised
            return tf.ensure_shape(tf.numpy_function(self._known, [], tf.float64), [3])

        return tf.Variable(late, trainable=False, shape=[3])

    # -- elastic training

    def common_state(self) -> dict[str, Any]:
        """What all ranks hold alike: plain numbers, for :meth:`rejoin`."""
        if self.board is None:
            return self._own.joined
        times = [_ROW.index(name) for name in ("began", "took", "before", "ended")]
        rows = self.board.rows.numpy()[np.r_[: len(self.slots), CAPACITY : CAPACITY + len(self.slots)]]
        rows[:, times] = rows[:, len(_ROW) :] = 0  # those are each rank's own
        heads = [slot.record.numpy()[:2].tolist() for slot in self.slots]
        return {"heads": heads, "rows": rows.tolist()}

    def rejoin(self, common: Mapping[str, Any]) -> None:
        """Goes on among other ranks, at the step of the rank whose :meth:`common_state` is given.

        The residuals stay this rank's own, but for ``memory="ef21"``, which begins anew.  Functions that
        were traced before are of the ranks before: trace them again.  See
        :class:`hvd_adaptive.tensorflow.elastic.ElasticState`, which does what it can of this.
        """
        self._own.ranks, self._own.functions, self._own.joined = [], {}, dict(common)
        for position, slot in enumerate(self.slots):
            if slot.residual is not None and not self._of(slot).memory.sends_parts:
                slot.residual.assign(tf.zeros_like(slot.residual))
            slot.forget()
            self._join(position)

    def _join(self, position: int) -> None:
        """Sets a slot to where the others are."""
        assert self.board is not None
        heads, rows = self._own.joined.get("heads", []), self._own.joined.get("rows", [])
        if position < len(heads):
            self.slots[position].record[:2].assign(heads[position])
            for half in (0, 1):
                self.board.rows[half * CAPACITY + position].assign(rows[half * len(heads) + position])

    # -- reports

    def statistics(self, session: Any = None) -> Statistics:
        """What was sent, received and spent, in the last step and in all.

        ``session``: the ``tf.compat.v1.Session``, where there is one.
        """
        if self.board is None:
            return Statistics()
        fetched = [slot.record for slot in self.slots], self.board.rows
        if session is None:
            records, rows = [r.numpy() for r in fetched[0]], fetched[1].numpy()
        else:
            records, rows = session.run(fetched)
        step = int(max(record[0] for record in records))
        if step == 0:
            return Statistics()
        recent = [record for record in records if record[0] == step]
        size = len(TRAFFIC)
        board = [dict(zip(_ROW, map(float, row), strict=False)) for row in rows if row[0] == step]
        price = max((row["price"] for row in board), default=0.0)
        bad = max((row["nonfinite"] for row in board), default=0.0)
        bad_steps = max((row["bad_steps"] for row in board), default=0.0) + bad
        return Statistics(
            step=step,
            last=_traffic(sum(record[2 : 2 + size] for record in recent), bad),
            total=_traffic(sum(record[2 + size :] for record in records), bad_steps),
            sparsity={s.label: int(r[1]) for s, r in zip(self.slots, records, strict=True) if r[0] == step},
            price=price,
            improvement=sum(row["improvement"] for row in board),
            reason=_reason(self._tuned[0][0].adaptive, board, price) if self._tuned else "a fixed recipe",
        )

    def residuals(self) -> dict[str, Any]:
        """The residual of each gradient that has one: float32, flat; this rank's own.

        A variable, or a part of one under a memory with more state than that.
        """
        kept = {slot.label: (slot.residual, slot.dimension) for slot in self.slots}
        return {
            label: state if state.shape[0] == dimension else state[:dimension]
            for label, (state, dimension) in kept.items()
            if state is not None
        }


def described(variables: Iterable[Any]) -> list[tuple[str, Any]]:
    """Name and shape of each variable.  Raises ConfigurationError where two share a name."""
    named = [(getattr(v, "path", None) or v.name, tf.TensorShape(v.shape)) for v in variables]
    plans.check_names([name for name, _ in named])
    return named


def _timed(tensors: Any) -> tuple[Any, Any]:
    """The tensors, and the time when they were there, before anything is computed from them."""
    with tf.control_dependencies([t for t in tf.nest.flatten(tensors) if t is not None]):
        now = tf.timestamp()
    with tf.control_dependencies([now]):
        return tf.nest.map_structure(lambda t: None if t is None else tf.identity(t), tensors), now


def _bits(tensor: Any) -> Any:
    return tf.cast(tf.size(tensor, tf.int64) * 8 * tensor.dtype.size, tf.float64)


def _recorded(slot: Slot, step: Any, sparsity: Any, counts: Mapping[str, Any]) -> Any:
    """The operation that notes a step in a slot's record."""
    now = tf.stack([tf.cast(counts.get(name, 0.0), tf.float64) for name in TRAFFIC])
    head = tf.stack([tf.cast(step + 1, tf.float64), tf.cast(sparsity, tf.float64)])
    total = slot.record.read_value()[2 + len(TRAFFIC) :] + now
    return slot.record.assign(tf.concat([head, now, total], 0), read_value=False)


def _control(recipe: Recipe, step: Any, start: _Start, known: Any) -> Control:
    directions, trial = (None, Trial()) if known is None else (known[0], Trial(*tf.unstack(known[1])))
    if recipe.adaptive is None:
        return Control(step=step, directions=directions, trial=trial)
    sparse, dense = Wholes(*tf.unstack(start.wholes)).told(TENSORFLOW)
    measure = float(recipe.adaptive.measure)
    return Control(
        step=step,
        directions=directions,
        trial=trial,
        price=start.price,
        dense=start.dense > 0,
        compute=start.compute,
        sparse_time=measure * sparse,
        dense_time=measure * dense,
    )


def _recent(kept: Any, began: Any, took: Any, before: Any) -> Any:
    """The recent times of a step without communication, with that of the last step added: seconds from
    the end of one reduction to the last gradient of the next, less those spent in compression."""
    last = tf.reduce_max(began)
    idle = last - before - tf.reduce_sum(tf.where(began < last, took, 0.0))
    newest = tf.where(before > 0, tf.maximum(idle, 1e-9), 0.0)
    return tf.concat([kept[1:], [newest]], 0)


def _median(recent: Any) -> Any:
    """Of the entries that are not 0, which marks those to come."""
    ordered = tf.sort(recent, direction="DESCENDING")
    known = tf.math.count_nonzero(recent)
    pair = tf.gather(ordered, tf.maximum(tf.stack([known - 1, known]) // 2, 0))
    return tf.where(known > 0, tf.reduce_mean(pair), 0.0)


def _traffic(counts: Any, nonfinite_steps: float) -> Traffic:
    values = dict(zip(TRAFFIC, counts.tolist(), strict=True))
    values["nonfinite_steps"] = nonfinite_steps
    whole = {name: int(value) for name, value in values.items() if "seconds" not in name}
    return Traffic(**{**values, **whole})


def _reason(tuned: Any, board: list[dict[str, float]], price: float) -> str:
    if price <= 0:
        return course.Course().reason
    dense = max(row["dense"] for row in board) > 0
    totals = course.Totals(*(sum(row[name] for row in board) for name in course.Totals._fields))
    return course.describe(tuned, price, dense, max(row["everything"] for row in board), totals)


def _other_members(ranks: list[int]) -> str:
    return (
        f"the gradients were reduced over other ranks than {ranks}, which this compressor was told of "
        "(or by op=hvd.Adasum, which no compressor here preserves); give the compressor and Horovod's "
        "optimizer or tape the same process_set="
    )


_OTHER_STEP = "the ranks are at different steps; load checkpoints of the same step on all of them"
