"""From gradient to what is sent, and back: one tensor, one step, one worker.

Two functions on explicit state.  Between them the caller, a framework's adapter, has Horovod
carry two things to all ranks:

* ``Outgoing.ring``, a float32 vector that goes through Horovod's allreduce.  It begins with the
  ballot; values that are summed coordinate by coordinate follow, where a step has such values.
* ``Outgoing.message``, int32 words of which every rank gets every rank's, in rank order.  It is
  empty where all values ride the ring.

The residual is not changed by what is sent until :func:`decompress` knows that the step counts:
where any rank's gradient is not finite, every rank sees a gradient that is not finite, and each
keeps its residual plus what is finite of its own gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import ballot, kernels, message, scan, selection
from .backend import Array, Backend, backend_of
from .cost import LinkTime
from .form import Trial
from .memory import ErrorFeedback
from .numpy_backend import NUMPY
from .policy import MORE_DIRECTIONS, Adaptive, Control, Led, Scanning, sends_all
from .recipe import INDEX_BITS, Recipe
from .values import NOTHING, value_kind


@dataclass(frozen=True)
class Plan:
    """The facts about one tensor that do not change from step to step.

    ``share``: its part of the fixed cost of a step.  ``recipe``: restated for the model.
    ``world_size``: of the process set, ``rank``: this worker's among all.  ``fingerprint``: of all
    that the user chose, compared between the ranks.  ``position``: this worker's among the process set.
    """

    name: str
    dimension: int
    share: float
    recipe: Recipe
    world_size: int
    rank: Any
    fingerprint: int
    position: int = 0


class Outgoing(NamedTuple):
    """What Horovod carries: see the module."""

    ring: Array
    message: Array


class Pending(NamedTuple):
    """What a worker remembers between :func:`compress` and :func:`decompress`.

    ``indices``: of what was sent (int64; in a dense step none is needed).  ``note``: what the memory
    asked to be remembered of it, or the values along directions.  ``sparsity``: the number of values.
    """

    indices: Array
    note: Array
    sparsity: Any


class Incoming(NamedTuple):
    """What Horovod brought back: the reduced ring, and the messages of all ranks one after the other,
    in rank order (None where none were gathered).  ``storage``: an array that is needed no more and
    may become the aggregate, float32[d]; or None."""

    ring: Array
    messages: Array | None
    storage: Array | None = None


def small(plan: Plan) -> bool:
    """Whether the tensor is too small to compress: all of it is sent, at every step."""
    return plan.recipe.spares(plan.dimension)


def dense(plan: Plan, control: Control) -> bool:
    """Whether the tensor is left to Horovod as it is."""
    return plan.recipe.leaves(plan.dimension) and not control.first


def keeps(plan: Plan) -> bool:
    """Whether something is carried over from step to step."""
    return plan.recipe.state_length(plan.dimension) > 0


def rides(plan: Plan, control: Control) -> bool:
    """Whether the whole tensor follows the ballot on the ring, whatever ``control.dense`` says."""
    return small(plan) and not control.first


def phase(control: Control) -> Any:
    """What the ranks compare of where they stand: 0 for a step in the first form, and else 1 to 7."""
    return 0 if control.first else 1 + control.step % 7


def gathers(plan: Plan, control: Control) -> bool:
    """Whether the step's message goes through an allgather (of plain, not traced, control)."""
    rides = plan.recipe.shared and not led(plan)
    return control.first or not (control.dense or rides or small(plan) or projects(plan, control))


def rings(plan: Plan, control: Control) -> bool:
    """Whether values of a sparse step ride Horovod's allreduce (of plain, not traced, control)."""
    sparse = not (control.first or control.dense or small(plan))
    return sparse and bool(plan.recipe.shared or projects(plan, control))


def led(plan: Plan) -> bool:
    """Whether some ranks name the coordinates that all send."""
    return isinstance(plan.recipe.policy, Led)


def projects(plan: Plan, control: Control) -> Any:
    """Whether a step that is not dense sends the tensor along directions."""
    low = plan.recipe.lowrank
    if low is None or control.first or small(plan):
        return False
    tuned = plan.recipe.adaptive
    if tuned is None:
        return True
    return trusts(plan, control.trial) & (control.price > 0) & (used(plan, control) >= tuned.fewest)


def trusts(plan: Plan, trial: Trial) -> Any:
    """Whether directions are sent of the tensor where enough of them can be afforded."""
    tuned = plan.recipe.adaptive
    return plan.recipe.lowrank is None or tuned is None or tuned.minor or trial.goes_on


def used(plan: Plan, control: Control) -> Any:
    """How many directions are sent: a number, or a scalar of a graph."""
    tuned, low = plan.recipe.adaptive, plan.recipe.lowrank
    assert low is not None
    if tuned is None:
        return low.rank
    if control.used is not None:
        return control.used
    if isinstance(control.price, (int, float)):  # what all ranks know on the host need not come from a device
        return int(tuned.used(NUMPY, np.zeros(0), plan.dimension, control, _coordinate_bits(plan)))
    return tuned.used(
        backend_of(control.price), control.price, plan.dimension, control, _coordinate_bits(plan)
    )


def _coordinate_bits(plan: Plan) -> int:
    return value_kind(plan.recipe.values).bits + INDEX_BITS


def along(b: Backend, plan: Plan, control: Control, values: Array, storage: Array | None = None) -> Array:
    """What ``values`` along the directions say of the tensor: float32[d], in ``storage`` if there is any."""
    low = plan.recipe.lowrank
    assert low is not None
    return low.spread(b, control, values, used(plan, control), storage)


def learnt(
    b: Backend, plan: Plan, control: Control, ring: Array, tally: ballot.Tally
) -> tuple[Array | None, Trial]:
    """The directions of the next step, and how they have done, from what all ranks have received of this."""
    low = plan.recipe.lowrank
    now, trial = control.directions, control.trial
    if low is None or control.first or small(plan):
        return now, trial
    values, number = ring[ballot.SIZE :], used(plan, control)
    sent = projects(plan, control) & (control.dense == False) & (tally.nonfinite == False)  # noqa: E712
    sent = b.constant(sent, "bool", ring)
    told = sent & all_finite(b, values)  # the sum may overflow where no part of it did
    now = b.cond(told, lambda: low.following(b, control, values, number), lambda: now)
    host = NUMPY if isinstance(tally.improvement, float) else b
    after = trial.after(host, tally.improvement, tally.alternative)
    return now, b.cond(sent, lambda: after, lambda: trial)


def all_finite(b: Backend, x: Array) -> Array:
    """Whether no element of a flat array is infinite or not a number: a boolean scalar."""
    host = kernels.host(b, x)
    return b.all_finite(x) if host is None else b.constant(scan.all_finite(host), "bool", x)


def residual(b: Backend, plan: Plan, like: Array) -> Array | None:
    """The memory's state before the first step: float32 zeros, or None where none is kept."""
    length = plan.recipe.state_length(plan.dimension)
    return b.zeros(length, "float32", like) if length else None


def compress(
    b: Backend, plan: Plan, control: Control, gradient: Array, residual: Array | None
) -> tuple[Outgoing, Pending, Array | None]:
    """What to send of ``gradient`` (any shape and floating dtype, d elements).

    ``residual``: the state of the recipe's memory.  Returns what Horovod shall carry, what to hand to
    :func:`decompress`, and the state, which may lie in the storage of the one given.  A residual is
    used even where the recipe keeps none: an earlier recipe left it.
    """
    flat = b.cast(b.reshape(gradient, (plan.dimension,)), "float32")
    memory, policy = plan.recipe.memory, plan.recipe.policy
    swept = _swept(b, plan, control, flat, residual)
    x, kept = flat, residual
    if swept is not None and residual is not None:
        (found, finite), x = swept, residual
    else:
        found, finite = None, all_finite(b, flat)
        x = b.cond(finite, lambda: flat, lambda: b.where(b.abs(flat) < float("inf"), flat, 0.0))
        if residual is not None:
            x, kept = memory.compensate(b, residual, x, plan.world_size)
    tuned = plan.recipe.adaptive
    weighs = tuned is not None and tuned.objective == "energy"
    energy = b.sum(x * x) if weighs else b.constant(0.0, "float32", x)
    nothing, none = b.zeros(0, "int32", x), b.constant(0.0, "float32", x)
    projecting, low = projects(plan, control), plan.recipe.lowrank

    def support() -> Array:
        if found is None:
            return policy.support(b, x, control)
        assert isinstance(policy, Scanning)
        return policy.chosen(b, x, found, control)

    def sparse() -> tuple[Array, ...]:
        kind = "fp32" if small(plan) else plan.recipe.values
        if small(plan) or sends_all(policy):
            indices, values = b.arange(plan.dimension, x), x
            words = message.encode_dense(values, kind)
        else:
            indices = b.cond(finite, support, lambda: b.zeros(0, "int64", x))
            values = b.take(x, indices)
            words = message.encode(indices, values, plan.dimension, kind)
        received = message.decoded_values(values, kind)
        unsent = values - received
        improvement = b.sum(values * values - unsent * unsent)
        return b.zeros(0, "float32", x), words, indices, memory.note(values, received), improvement, none

    def everything() -> tuple[Array, ...]:
        indices, note = memory.note_all(b, x)
        return x, nothing, indices, note, energy, none

    def shared() -> tuple[Array, ...]:
        indices = policy.support(b, x, control)
        if control.first:  # the settings are not known to agree yet, and so neither do the supports
            indices = b.cast(0 - b.sort(0 - indices), "int64")
        values = b.take(x, indices)
        note, improvement = memory.note(values, values), b.sum(values * values)
        if control.first:
            words = message.encode(indices, values, plan.dimension, "fp32")
            return b.zeros(0, "float32", x), words, indices, note, improvement, none
        if isinstance(policy, Led) and policy.leads(plan.position, plan.world_size, control.step):
            named = policy.following(b, x, control, plan.world_size)
            length = b.length(named)
            words = message.encode(named, b.zeros(length, "float32", x), plan.dimension, NOTHING.name)
            return values, words, indices, note, improvement, none
        return values, nothing, indices, note, improvement, none

    def projected() -> tuple[Array, ...]:
        assert low is not None
        number = used(plan, control)
        values = low.project(b, x, control, number) if found is None else found
        other = none
        if tuned is not None and not tuned.minor:
            other = tuned.alternative(b, x, number, _coordinate_bits(plan))
        return values, nothing, b.zeros(0, "int64", x), values, b.sum(values * values), other

    def chosen() -> tuple[Array, ...]:
        way = shared if plan.recipe.shared and not small(plan) else sparse
        return way() if low is None else b.cond(b.constant(projecting, "bool", x), projected, way)

    send_all = b.constant(rides(plan, control) or control.dense, "bool", x)
    riding, words, indices, note, improvement, alternative = b.cond(send_all, everything, chosen)
    if low is not None:  # sums of huge numbers
        finite = finite & all_finite(b, riding)
    if tuned is None:
        fixed = variable = sparse_time = dense_time = b.constant(0.0, "float32", x)
    else:
        compute, sparse_time, dense_time = (
            plan.share * b.cast(b.constant(seconds, "float64", x), "float64")
            for seconds in (control.compute, control.sparse_time, control.dense_time)
        )
        fixed = plan.share * tuned.cost.fixed + compute
        variable = _variable(b, plan, tuned, indices, words, control.first)
        if low is not None:
            each = tuned.direction / MORE_DIRECTIONS  # so that the price is that of coordinates
            ring = b.cast(b.constant(used(plan, control), "float32", x), "float32") * each
            variable = b.where(b.constant(projecting, "bool", x) & (send_all == False), ring, variable)  # noqa: E712
    vote = ballot.make(
        b,
        x,
        nonfinite=finite == False,  # noqa: E712  (an array, perhaps traced)
        improvement=improvement,
        energy=energy,
        fixed=fixed,
        variable=variable,
        sparse_time=sparse_time,
        dense_time=dense_time,
        alternative=alternative,
        rank=b.constant(plan.rank, "float32", x),
        fingerprint=plan.fingerprint,
        phase=phase(control),
    )
    sparsity = b.cond(
        send_all,
        lambda: b.constant(plan.dimension, "int64", x),
        lambda: b.cast(b.constant(b.length(note), "int64", x), "int64"),
    )
    return Outgoing(b.concat([vote, riding]), words), Pending(indices, note, sparsity), kept


def _swept(
    b: Backend, plan: Plan, control: Control, flat: Array, residual: Array | None
) -> tuple[Array | None, Array] | None:
    """Adds the gradient to the residual of error feedback, and in the same pass over the host's memory finds
    the candidates of the policy, or what the sum is along the directions (None: neither is asked for); and
    says whether all of ``flat`` is finite.  None where that cannot be done, and nothing has been."""
    policy, low = plan.recipe.policy, plan.recipe.lowrank
    if residual is None or not isinstance(plan.recipe.memory, ErrorFeedback):
        return None
    total, own = kernels.host(b, residual), kernels.host(b, flat)
    if total is None or own is None:
        return None
    sparse = not (small(plan) or bool(control.dense))
    if sparse and projects(plan, control):
        assert low is not None
        found, finite = low.swept(b, total, own, control, used(plan, control), flat)
    elif sparse and isinstance(policy, Scanning) and not sends_all(policy):
        drawn = selection.sample(b, residual) + selection.sample(b, flat)
        threshold = float(policy.threshold(b, drawn, plan.dimension, control))
        positions, finite = scan.add_at_least(total, own, threshold)
        found = b.from_host(positions, flat)
    else:
        found, (_, finite) = None, scan.add_at_least(total, own, math.inf)
    return found, b.constant(finite, "bool", flat)


def _variable(b: Backend, plan: Plan, tuned: Adaptive, indices: Array, words: Array, first: bool) -> Array:
    """The cost of a message beyond its fixed part: of the bits that are sent, where it is a time, and
    of the coordinates by the cost model, where another unit says what counts."""

    if not isinstance(tuned.cost, LinkTime):
        own = tuned.cost.for_dimension(max(1, plan.dimension))
        return _bits(b, indices) / 32 * own.marginal() + own.head
    sent = _bits(b, words)
    if not led(plan) or first:
        return sent * tuned.cost.per_bit
    return _bits(b, indices) * tuned.cost.per_bit + sent * (1 / tuned.cost.bandwidth)


def _bits(b: Backend, x: Array) -> Array:
    """Those of as many 32-bit words as ``x`` has elements: a float32 scalar."""
    return b.cast(b.constant(b.length(x), "float32", x), "float32") * 32


def decompress(
    b: Backend,
    plan: Plan,
    control: Control,
    incoming: Incoming,
    pending: Pending,
    residual: Array | None,
) -> tuple[Array, Array | None]:
    """The gradient of all ranks (float32, d elements, scaled as Horovod reduces), and the residual.

    ``control`` and ``pending`` are those of the same step's :func:`compress`, ``residual`` the
    one that it returned.  Raises MessageError where a rank's message is not what it claims.
    """
    residual = settled(b, plan, control, incoming.ring, pending, residual)
    return aggregated(b, plan, control, incoming, pending, residual)


def aggregated(
    b: Backend,
    plan: Plan,
    control: Control,
    incoming: Incoming,
    pending: Pending,
    residual: Array | None,
) -> tuple[Array, Array | None]:
    """The second half of :func:`decompress`, with the residual that :func:`settled` returned."""
    ring = incoming.ring
    riding = ring[ballot.SIZE :]

    def gathered() -> Array:
        kind = None if control.first else plan.recipe.values  # other ranks' may differ until compared
        return message.accumulate(
            incoming.messages,
            plan.world_size,
            plan.dimension,
            kind,
            scale=ballot.scale(ring, plan.world_size),
            into=incoming.storage,
        )

    def spread() -> Array:
        room = incoming.storage
        empty = b.zeros(plan.dimension, "float32", ring) if room is None else b.clear_(room)
        return b.put_(empty, pending.indices, riding)

    shared = plan.recipe.shared and not small(plan) and not control.first

    def parts() -> Array:
        way = spread if shared else gathered
        if plan.recipe.lowrank is None:
            return way()
        projecting = b.constant(projects(plan, control), "bool", ring)
        return b.cond(projecting, lambda: along(b, plan, control, riding, incoming.storage), way)

    whole = b.constant(rides(plan, control) or control.dense, "bool", ring)
    aggregate = b.cond(whole, lambda: riding, parts)
    nan, bad = b.constant(float("nan"), "float32", ring), ballot.nonfinite(ring)
    if residual is None or not keeps(plan):
        return b.cond(bad, lambda: aggregate + nan, lambda: aggregate), residual
    memory = plan.recipe.memory
    gradient, kept = b.cond(
        bad, lambda: (aggregate + nan, residual), lambda: memory.receive(b, residual, aggregate)
    )
    return gradient, kept


def following(b: Backend, plan: Plan, control: Control, messages: Array) -> Array:
    """What all ranks send of the tensor in the next step: int64 indices, ascending, that the leaders name
    in the gathered messages, or, after a first step, that the first rank sent in that.

    Raises MessageError where a message is not what it claims.
    """
    policy = plan.recipe.policy
    assert isinstance(policy, Led)
    if control.first:
        return message.decode(message.split(messages, plan.world_size)[0], plan.dimension)[0]
    parts = message.split(messages, policy.count(plan.world_size))
    named = b.concat([message.decode(part, plan.dimension, NOTHING.name)[0] for part in parts])
    ordered = 0 - b.sort(0 - named)
    fresh = b.nonzero(b.concat([b.constant([True], "bool", ordered), ordered[1:] != ordered[:-1]]))
    return b.take(ordered, fresh[: b.length(ordered)])


def settled(
    b: Backend, plan: Plan, control: Control, ring: Array, pending: Pending, residual: Array | None
) -> Array | None:
    """The first half of :func:`decompress`: the residual, now that the step counts or does not."""
    if residual is None:
        return None
    if not keeps(plan):
        return b.cond(ballot.nonfinite(ring), lambda: residual, lambda: None)
    memory, whole = plan.recipe.memory, small(plan) or sends_all(plan.recipe.policy)
    low = plan.recipe.lowrank

    def parts() -> Array:
        return memory.remainder(b, residual, pending.indices, pending.note, whole)

    def remainder() -> Array:
        if low is None:
            return parts()
        number = used(plan, control)
        projecting = b.constant(projects(plan, control), "bool", ring)
        return b.cond(projecting, lambda: low.less(b, residual, control, pending.note, number), parts)

    return b.cond(
        ballot.nonfinite(ring),
        lambda: residual,
        lambda: b.cond(
            b.constant(rides(plan, control) or control.dense, "bool", ring),
            lambda: memory.cleared(b, residual, pending.note),
            remainder,
        ),
    )
