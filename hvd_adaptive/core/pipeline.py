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

from dataclasses import dataclass
from typing import Any, NamedTuple

from . import ballot, kernels, message, scan, selection
from .backend import Array, Backend
from .cost import LinkTime
from .memory import ErrorFeedback
from .policy import Adaptive, Control, Led, Scanning, sends_all
from .recipe import Recipe
from .values import NOTHING


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
    asked to be remembered of it.  ``sparsity``: T.
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
    return control.first or not (control.dense or rides or small(plan))


def led(plan: Plan) -> bool:
    """Whether some ranks name the coordinates that all send."""
    return isinstance(plan.recipe.policy, Led)


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
        (candidates, finite), x = swept, residual
    else:
        candidates, finite = None, all_finite(b, flat)
        x = b.cond(finite, lambda: flat, lambda: b.where(b.abs(flat) < float("inf"), flat, 0.0))
        if residual is not None:
            x, kept = memory.compensate(b, residual, x, plan.world_size)
    tuned = plan.recipe.adaptive
    weighs = tuned is not None and tuned.objective == "energy"
    energy = b.sum(x * x) if weighs else b.constant(0.0, "float32", x)
    nothing = b.zeros(0, "int32", x)

    def support() -> Array:
        if candidates is None:
            return policy.support(b, x, control)
        assert isinstance(policy, Scanning)
        return policy.chosen(b, x, candidates, control)

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
        return b.zeros(0, "float32", x), words, indices, memory.note(values, received), improvement

    def everything() -> tuple[Array, ...]:
        indices, note = memory.note_all(b, x)
        return x, nothing, indices, note, energy

    def shared() -> tuple[Array, ...]:
        indices = policy.support(b, x, control)
        if control.first:  # the settings are not known to agree yet, and so neither do the supports
            indices = b.cast(0 - b.sort(0 - indices), "int64")
        values = b.take(x, indices)
        note, improvement = memory.note(values, values), b.sum(values * values)
        if control.first:
            words = message.encode(indices, values, plan.dimension, "fp32")
            return b.zeros(0, "float32", x), words, indices, note, improvement
        if isinstance(policy, Led) and policy.leads(plan.position, plan.world_size, control.step):
            named = policy.following(b, x, control, plan.world_size)
            length = b.length(named)
            words = message.encode(named, b.zeros(length, "float32", x), plan.dimension, NOTHING.name)
            return values, words, indices, note, improvement
        return values, nothing, indices, note, improvement

    send_all = b.constant(rides(plan, control) or control.dense, "bool", x)
    riding, words, indices, note, improvement = b.cond(
        send_all, everything, shared if plan.recipe.shared and not small(plan) else sparse
    )
    if tuned is None:
        fixed = variable = sparse_time = dense_time = b.constant(0.0, "float32", x)
    else:
        compute, sparse_time, dense_time = (
            plan.share * b.cast(b.constant(seconds, "float64", x), "float64")
            for seconds in (control.compute, control.sparse_time, control.dense_time)
        )
        fixed = plan.share * tuned.cost.fixed + compute
        variable = _variable(b, plan, tuned, indices, words, control.first)
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
        rank=b.constant(plan.rank, "float32", x),
        fingerprint=plan.fingerprint,
        phase=phase(control),
    )
    sparsity = b.cond(
        send_all,
        lambda: b.constant(plan.dimension, "int64", x),
        lambda: b.cast(b.constant(b.length(indices), "int64", x), "int64"),
    )
    return Outgoing(b.concat([vote, riding]), words), Pending(indices, note, sparsity), kept


def _swept(
    b: Backend, plan: Plan, control: Control, flat: Array, residual: Array | None
) -> tuple[Array, Array] | None:
    """Adds the gradient to the residual of error feedback and finds the candidates of the policy in one
    pass over the host's memory: their indices, and whether all of ``flat`` is finite.  None where that
    cannot be done, and nothing has been."""
    policy = plan.recipe.policy
    if residual is None or not isinstance(plan.recipe.memory, ErrorFeedback):
        return None
    if small(plan) or sends_all(policy) or not isinstance(policy, Scanning):
        return None
    total, own = kernels.host(b, residual), kernels.host(b, flat)
    if total is None or own is None or bool(control.dense):
        return None
    drawn = selection.sample(b, residual) + selection.sample(b, flat)
    threshold = float(policy.threshold(b, drawn, plan.dimension, control))
    found, finite = scan.add_at_least(total, own, threshold)
    return b.from_host(found, flat), b.constant(finite, "bool", flat)


def _variable(b: Backend, plan: Plan, tuned: Adaptive, indices: Array, words: Array, first: bool) -> Array:
    """The cost of a message beyond its fixed part: of the bits that are sent, where it is a time, and
    of the coordinates by the cost model, where another unit says what counts."""

    def number(x: Array) -> Array:
        return b.cast(b.constant(b.length(x), "float32", words), "float32")

    if not isinstance(tuned.cost, LinkTime):
        own = tuned.cost.for_dimension(max(1, plan.dimension))
        return number(indices) * own.marginal() + own.head
    sent = number(words) * 32
    if not led(plan) or first:
        return sent * tuned.cost.per_bit
    return number(indices) * 32 * tuned.cost.per_bit + sent * (1 / tuned.cost.bandwidth)


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
    whole = b.constant(rides(plan, control) or control.dense, "bool", ring)
    aggregate = b.cond(whole, lambda: riding, spread if shared else gathered)
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
    return b.cond(
        ballot.nonfinite(ring),
        lambda: residual,
        lambda: b.cond(
            b.constant(rides(plan, control) or control.dense, "bool", ring),
            lambda: memory.cleared(b, residual, pending.note),
            lambda: memory.remainder(b, residual, pending.indices, pending.note, whole),
        ),
    )
