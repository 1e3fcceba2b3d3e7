"""One worker's side of a training job: the state of all its tensors, step after step.

This is what a framework's adapter wraps, and what simulated workers are made of.  It moves nothing
itself: the caller carries rings and messages between the workers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import ballot, message, pipeline, plans
from .backend import Array, Backend
from .course import Course, advance
from .errors import ConfigurationError, SettingsMismatchError
from .form import Trial
from .link import Link
from .memory import ErrorFeedback, refitted
from .policy import Control
from .recipe import Recipe
from .statistics import Statistics, Traffic
from .timing import StepClock

FORMAT = 3

BUCKETS = 2
"""Allgathers per step: the first leaves in the middle of the backward pass."""

MEMORY = 64
"""Steps of the model after which a round is forgotten, however far behind some tensors are."""


_COMMON = ("step", "price", "dense")
"""What of a course's control is kept: the rest is each tensor's or each rank's own."""


class Context(NamedTuple):
    """What a tensor's way out leaves for its way back."""

    slot: int
    step: int  # of the tensor, since the first of the training
    control: Control
    pending: pipeline.Pending | None  # None: the tensor went dense, as it is


@dataclasses.dataclass
class _Round:
    """One step of the model: what governed it, and what came of it.  ``scale``: of its losses."""

    course: Course
    scale: float = 1.0
    tallies: dict[int, ballot.Tally] = dataclasses.field(default_factory=dict)
    sparsity: dict[str, int] = dataclasses.field(default_factory=dict)
    traffic: Traffic = Traffic()
    riding: int = 0


class _Sent(NamedTuple):
    """What a step sent of a tensor: ``indices`` of what rode the ring (None: of all), and the plan and
    control by which it was made."""

    step: int
    outgoing: pipeline.Outgoing
    indices: Array | None
    plan: pipeline.Plan
    control: Control


class Worker:
    """Residuals, steps, price and counts of one worker.

    ``b``: the backend of its arrays.  ``shapes`` maps names to shapes (or numbers of elements), in the
    model's order; a tensor's position there is its slot.  ``overrides``: see :class:`plans.Choice`.

    Gradients may be in the unit of a loss scale that changes (mixed precision): say so with
    :meth:`follow` before the gradients of a step go out.

    A tensor's steps are its own: not all tensors need take part in every step of the model.  A
    tensor that has fallen behind joins the newest step when its own is over, so that what governs
    it is never old.
    """

    def __init__(
        self,
        b: Backend,
        recipe: Recipe | str | Mapping[str, Any],
        shapes: Mapping[str, int | Sequence[int]],
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        plans.check_names(list(shapes))
        self._b = b
        self._choice = plans.choose(recipe, overrides, list(shapes))
        self._shapes = {name: (s,) if isinstance(s, int) else tuple(s) for name, s in shapes.items()}
        self.dimensions = {name: math.prod(shape) for name, shape in self._shapes.items()}
        self.names = list(shapes)
        self.clock = StepClock()
        self._residuals: list[Array | None] = [None] * len(self.names)
        self._steps = [0] * len(self.names)
        self._latest = 0  # of the steps
        self._since = 0  # the step at which the recipe was set
        self._first = set(range(len(self.names)))  # slots of which no step has counted since then
        self._supports: list[Array | None] = [None] * len(self.names)  # what all ranks send next
        self._directions: list[Array | None] = [None] * len(self.names)  # None: those of the start
        self._trials = [Trial()] * len(self.names)
        self._flushed: set[int] = set()  # slots that a dense step left nothing to keep for
        self._away: set[int] = set()  # slots whose gradient went out and has not come back
        self._rounds: dict[int, _Round] = {}
        self._course = Course()
        self._total = Traffic()
        self._scale = 1.0  # of the losses whose gradients go out
        self._scales = [1.0] * len(self.names)  # of the residuals
        self._unit = 1.0  # of the course: the loss scale of its price
        self._skips = False  # whether a step in which some gradient is not finite is skipped as a whole
        self._sent: dict[int, _Sent] = {}  # what may have to be undone
        self._ranks: list[int] = []
        self._plans: list[pipeline.Plan] = []
        self._agreed = False  # whether all ranks are known to have the same settings
        self._link: Link | None = None

    # -- who takes part

    @property
    def ranks(self) -> list[int]:
        """Those that take part; empty before :meth:`meet`."""
        return self._ranks

    @property
    def recipe(self) -> Recipe:
        """Of the tensors that no override names."""
        return self._choice.recipe

    @property
    def compressed(self) -> list[int]:
        """The slots whose tensors are large enough to be compressed."""
        dimensions = enumerate(self.dimensions.items())
        return [slot for slot, (name, d) in dimensions if not self._of(name).spares(d)]

    def _of(self, name: str) -> Recipe:
        return self._choice.of(name, self._shapes[name])

    def buckets(self, first: bool = False) -> list[list[int]]:
        """The slots whose messages travel together; in their ``first`` step, all do."""
        if first:
            return [list(range(len(self.names)))]
        large = self.compressed
        dimensions = [self.dimensions[self.names[slot]] for slot in large]
        return [[large[position] for position in group] for group in plans.buckets(dimensions, BUCKETS)]

    @property
    def riding(self) -> int:
        """Values of compressed tensors that rode Horovod's allreduce in the last step, if it was sparse."""
        last = self._rounds.get(self._latest - 1)
        return 0 if last is None else last.riding

    def set_recipe(
        self, recipe: Recipe | str | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
    ) -> None:
        """Goes on with another recipe from the next step; all residuals are kept.

        Raises ConfigurationError for bad settings, and in the middle of a step.
        """
        choice = plans.choose(recipe, overrides, self.names)
        if self._away:
            raise ConfigurationError(
                "set_recipe must be called between steps: after optimizer.step() and before backward()"
            )
        self._reclaim_all()
        self._residuals = [
            residual if residual is None else self._refitted(slot, residual, choice)
            for slot, residual in enumerate(self._residuals)
        ]
        self._choice = choice
        self._since = self._latest
        self._steps = [self._latest] * len(self.names)
        self._first = set(range(len(self.names)))
        self._supports, self._directions = [None] * len(self.names), [None] * len(self.names)
        self._trials = [Trial()] * len(self.names)
        start = Control(step=self._latest)
        self._course = Course(start, reason="a new recipe: no price yet")
        self._rounds[self._latest] = _Round(self._course, self._scale)
        self._leave()

    def _leave(self) -> None:
        """Who takes part is to be learnt anew, and whether all have the same settings."""
        self._ranks, self._plans, self._agreed, self._link = [], [], False, None

    def _refitted(self, slot: int, residual: Array, choice: plans.Choice) -> Array:
        name = self.names[slot]
        old, new = self._choice.named(name).memory, choice.named(name).memory
        return refitted(self._b, old, new, residual, self.dimensions[name])

    def met(self, ranks: Sequence[int], rank: int) -> bool:
        """Whether :meth:`meet` was told this last."""
        return list(ranks) == self._ranks and rank == self._plans[0].rank

    @property
    def wants_link(self) -> bool:
        """Whether :meth:`meet` should be told of a measured link now.

        All ranks that take part want one before the same step, and none before it is known that all
        have the same settings: one that does not want any would leave the others waiting.
        """
        return self._choice.auto and self._agreed and self._link is None and self.idle

    def meet(self, ranks: Sequence[int], rank: int, link: Link | None = None) -> None:
        """Learns who takes part, which rank this is, and what was measured of the link between them."""
        if list(ranks) != self._ranks:
            if self._ranks:  # newcomers have not seen the dense step that left nothing to keep
                self._flushed.clear()
            self._ranks, self._agreed, self._link = list(ranks), False, None
        if link is not None:  # it may call for another transport, which begins as the first did
            self._link, self._first = link, set(range(len(self.names)))
        position = self._ranks.index(rank)
        made = plans.plan(self._choice, self._shapes, len(ranks), rank, self._link, position)
        self._plans = list(made.values())

    # -- loss scale

    @property
    def idle(self) -> bool:
        """Whether no gradient is under way."""
        return not self._away

    def follow(self, scale: float) -> None:
        """The gradients that go out from now on are those of losses times ``scale``.

        Residuals and the price keep their worth.  Whoever scales losses skips the whole step where any
        gradient is not finite, so what other tensors sent in such a step is taken back.
        Raises ConfigurationError unless the scale is above 0 and finite.
        """
        if not 0 < scale < float("inf"):
            raise ConfigurationError(f"a loss scale must be above 0 and finite, not {scale!r}")
        self._scale, self._skips = float(scale), True

    def _rescale(self, slot: int) -> None:
        """Brings the tensor's residual to the unit of its gradient."""
        residual, factor = self._residuals[slot], self._scale / self._scales[slot]
        if residual is not None and factor != 1:
            self._residuals[slot] = residual * factor
        self._scales[slot] = self._scale

    def _remember(self, context: Context, outgoing: pipeline.Outgoing) -> None:
        """Keeps what a step sends until it is known whether it was skipped."""
        slot, control, pending = context.slot, context.control, context.pending
        plan = self._plans[slot]
        if not self._skips or self._residuals[slot] is None or not plan.recipe.memory.sends_parts:
            return
        assert pending is not None
        indices = pending.indices if self._b.length(pending.indices) else None  # of what rides; None: all
        riding = self._b.copy(outgoing.ring[ballot.SIZE :])  # the ring itself is reduced in place
        self._sent[slot] = _Sent(context.step, outgoing._replace(ring=riding), indices, plan, control)

    def _reclaim(self, slot: int) -> None:
        """Gives back to the residual what the tensor sent in a step that was skipped."""
        sent = self._sent.pop(slot, None)
        if sent is None:
            return
        step, outgoing, indices, plan, control = sent
        round, residual = self._rounds.get(step), self._residuals[slot]
        if residual is None or round is None or not round.traffic.nonfinite_steps:
            return
        tally = round.tallies.get(slot)
        if tally is None or tally.nonfinite:  # then the residual is what it was
            return
        b, values = self._b, outgoing.ring
        if b.length(outgoing.message) and not b.length(values):  # else the message names a support
            indices, values = message.decode(outgoing.message)
        elif indices is None:
            if pipeline.projects(plan, control) and not control.dense:
                values = pipeline.along(b, plan, control, values)
            indices = b.arange(b.length(values), values)
        self._flushed.discard(slot)
        self._residuals[slot] = b.scatter_add_(residual, indices, values)

    def _reclaim_all(self) -> None:
        for slot in list(self._sent):
            self._reclaim(slot)

    # -- one tensor's way out and back

    def control(self, slot: int) -> Control:
        """What governs the tensor's next step."""
        plan, step, first = self._plans[slot], self._step(slot), slot in self._first
        tuned, course = plan.recipe.adaptive, self._round(step).course.control
        if first or tuned is None:  # neither a price nor dense steps
            course = Control()
        timed = tuned is not None and tuned.measure
        sparse, dense = self.clock.wholes if timed else (0.0, 0.0)
        control = Control(
            step=step - self._since,
            price=course.price,
            dense=course.dense,
            compute=self.clock.compute if timed else 0.0,
            sparse_time=sparse,
            dense_time=dense,
            first=first,
            support=None if first else self._supports[slot],
            directions=None if first else self._directions[slot],
            trial=Trial() if first else self._trials[slot],
        )
        if first or control.dense or plan.recipe.lowrank is None:
            return control
        return dataclasses.replace(control, used=pipeline.used(plan, control))

    def outgoing(self, slot: int, gradient: Array) -> tuple[pipeline.Outgoing | None, Context]:
        """What to send of a gradient, or None for one that goes as it is.

        ``Outgoing.message`` is to be gathered where :meth:`gathers` says so.
        """
        self._reclaim(slot)
        self._rescale(slot)
        plan, control, step = self._plans[slot], self.control(slot), self._step(slot)
        round = self._round(step)
        self._away.add(slot)
        if pipeline.dense(plan, control) or (control.dense and slot in self._flushed):
            round.sparsity[plan.name] = plan.dimension
            return None, Context(slot, step, control, None)
        if pipeline.keeps(plan) and self._residuals[slot] is None:
            self._residuals[slot] = pipeline.residual(self._b, plan, gradient)
        outgoing, pending, self._residuals[slot] = pipeline.compress(
            self._b, plan, control, gradient, self._residuals[slot]
        )
        round.sparsity[plan.name] = int(pending.sparsity)
        context = Context(slot, step, control, pending)
        if pipeline.rings(plan, control):
            round.riding += int(pending.sparsity)
        self._remember(context, outgoing)
        return outgoing, context

    def gathers(self, context: Context) -> bool:
        """Whether the tensor's message of this step goes to all ranks."""
        return context.pending is not None and pipeline.gathers(self._plans[context.slot], context.control)

    def incoming(
        self, context: Context, ring: Array, messages: Array | None, storage: Array | None = None
    ) -> Array:
        """The aggregate (float32, d elements) from the reduced ring and all ranks' messages, which
        stand one after the other.  ``storage``: float32[d] that may become the aggregate.

        Raises SettingsMismatchError where the ranks' settings differ, and MessageError for a damaged
        message.
        """
        self.settle(context, ring)
        return self.aggregate(context, ring, messages, storage)

    def aggregate(
        self, context: Context, ring: Array, messages: Array | None, storage: Array | None = None
    ) -> Array:
        """The second half of :meth:`incoming`, after :meth:`settle`."""
        assert context.pending is not None
        slot = context.slot
        self.learn(context, ring, messages)
        incoming = pipeline.Incoming(ring, messages, storage)
        gradient, self._residuals[slot] = pipeline.aggregated(
            self._b, self._plans[slot], context.control, incoming, context.pending, self._residuals[slot]
        )
        return gradient

    def learn(self, context: Context, ring: Array, messages: Array | None) -> None:
        """Takes from what all ranks have received what they need to know alike for the next step: the
        support, where one rank names it, and the directions."""
        slot, control = context.slot, context.control
        plan, tally = self._plans[slot], self._rounds[context.step].tallies[slot]
        if messages is not None and pipeline.led(plan):
            self._supports[slot] = pipeline.following(self._b, plan, control, messages)
        if control.first:
            self._directions[slot], self._trials[slot] = None, Trial()
            return
        self._directions[slot], trial = pipeline.learnt(self._b, plan, control, ring, tally)
        self._trials[slot] = Trial(*map(float, trial))
        if not pipeline.trusts(plan, self._trials[slot]):
            self._directions[slot] = None  # they have lost, and are needed no more
        if pipeline.projects(plan, control):
            self._supports[slot] = None  # nobody has named the coordinates of the next step

    def settle(self, context: Context, ring: Array) -> None:
        """The first half of :meth:`incoming`: the ballot is counted and the residual kept.

        The ring alone tells whether the settings agree, so an adapter calls this before it waits for
        messages, which would never come from a rank that sends none.
        """
        slot = context.slot
        plan, round = self._plans[slot], self._rounds[context.step]
        assert context.pending is not None
        phase = pipeline.phase(context.control)
        ballots = _on_host(self._b, ring[: ballot.SIZE])
        tally = ballot.tally(ballots, self._ranks, plan.fingerprint, phase)
        self._verify(tally)
        self._agreed = True
        self._residuals[slot] = pipeline.settled(
            self._b, plan, context.control, ring, context.pending, self._residuals[slot]
        )
        if tally.nonfinite:
            self._nonfinite(context)
        else:
            self._first.discard(slot)
            forgets = isinstance(plan.recipe.memory, ErrorFeedback)  # others change in dense steps too
            (self._flushed.add if context.control.dense and forgets else self._flushed.discard)(slot)
        round.tallies[slot] = tally

    def as_it_is(self, context: Context, aggregate: Array) -> None:
        """The flat ``aggregate`` of a gradient that went without a ballot has come back."""
        if not bool(pipeline.all_finite(self._b, aggregate)):
            self._nonfinite(context)

    def _nonfinite(self, context: Context) -> None:
        """Some rank's gradient of this tensor was not finite."""
        if self._rounds[context.step].traffic.nonfinite_steps == 0:
            self.count(context, Traffic(nonfinite_steps=1))

    def done(self, context: Context) -> None:
        """The tensor's step is over."""
        self._latest = max(self._latest, context.step + 1)
        self._steps[context.slot] = self._latest
        self._away.discard(context.slot)
        self.clock.reduced(bool(context.control.dense))

    def count(self, context: Context, traffic: Traffic) -> None:
        """Adds to what the tensor's step, and all steps, have sent, received and taken."""
        self._rounds[context.step].traffic += traffic
        self._total += traffic

    def _verify(self, tally: ballot.Tally) -> None:
        if not tally.same_members:
            raise SettingsMismatchError(
                f"the gradients were reduced over other ranks than {self._ranks}, which this compressor "
                "was told of; give the compressor and Horovod's optimizer the same process_set="
            )
        if not tally.same_settings:
            raise SettingsMismatchError(
                "the ranks compress with different settings; give every rank the same recipe and options "
                f"(rank {self._plans[0].rank} has {self.recipe} and overrides {self._choice.overrides})"
            )
        if not tally.same_phase:
            raise SettingsMismatchError(
                f"the ranks are at different steps (rank {self._plans[0].rank} is at {self._latest}); load "
                "checkpoints of the same step on all of them, and call set_recipe on all at the same step"
            )

    def _step(self, slot: int) -> int:
        """The tensor's next step, or the oldest that is remembered."""
        return max(self._steps[slot], self._latest - MEMORY)

    def _round(self, step: int) -> _Round:
        """The round of a step; its course follows from the ballots of the step before."""
        if step not in self._rounds:
            before = self._rounds.get(step - 1)
            if before is not None and self._plans:
                tuned = self._tuned
                tallies = [before.tallies[slot] for slot in sorted(before.tallies) if slot in tuned]
                dimension = sum(self._plans[slot].dimension for slot in tuned)
                recipe = self._plans[tuned[0]].recipe if tuned else self.recipe
                self._course = advance(recipe, max(1, dimension), before.course, tallies)
                self._unit = before.scale
            self._rounds[step] = _Round(self._course, self._unit)
            for old in [s for s in self._rounds if s < self._latest - MEMORY]:
                del self._rounds[old]
        round = self._rounds[step]
        if round.scale != self._scale and not round.tallies:
            control = round.course.control
            if self._choice.energy:  # such a price is in squared units of the gradients
                control = dataclasses.replace(control, price=control.price * (self._scale / round.scale) ** 2)
            round.course, round.scale = dataclasses.replace(round.course, control=control), self._scale
            self._course, self._unit = round.course, round.scale
        return round

    @property
    def _tuned(self) -> list[int]:
        """The slots for which the price is made."""
        return [slot for slot in self.compressed if self._plans[slot].recipe.adaptive is not None]

    # -- reports

    def statistics(self) -> Statistics:
        """What was sent, received and spent, in the last step and in all."""
        step = self._latest
        last = self._rounds.get(step - 1)
        if last is None:
            return Statistics(step=step, total=self._total, reason=self._course.reason)
        return Statistics(
            step=step,
            last=last.traffic,
            total=self._total,
            sparsity=dict(last.sparsity),
            price=last.course.control.price,
            improvement=sum(t.improvement for t in last.tallies.values()),
            reason=last.course.reason,
        )

    def residuals(self) -> dict[str, Array]:
        """The residual of each tensor that has one: float32, d elements, this worker's own; not a copy."""
        return {name: state[: self.dimensions[name]] for name, state in self._states().items()}

    def _states(self) -> dict[str, Array]:
        """The memory's state of each tensor that has one."""
        return {n: r for n, r in zip(self.names, self._residuals, strict=True) if r is not None}

    # -- checkpoints

    def state(self) -> dict[str, Any]:
        """Residuals (copies), steps, price and counts: arrays and plain numbers.

        Raises ConfigurationError in the middle of a step.
        """
        if self._away:
            raise ConfigurationError(
                "state_dict must be called between steps: after optimizer.step() and before backward()"
            )
        self._reclaim_all()
        course = self._round(self._latest).course
        return {
            "format": FORMAT,
            "recipe": self.recipe.name,
            "memories": {name: self._memory(name) for name in self._states()},
            "scales": dict(zip(self.names, self._scales, strict=True)),
            "unit": self._unit,
            "scale": self._scale,
            "residuals": {name: self._b.copy(state) for name, state in self._states().items()},
            "steps": dict(zip(self.names, self._steps, strict=True)),
            "since": self._since,
            "first": [self.names[slot] for slot in sorted(self._first)],
            "supports": {
                name: self._b.copy(support)
                for name, support in zip(self.names, self._supports, strict=True)
                if support is not None
            },
            "directions": {
                name: self._b.copy(directions)
                for name, directions in zip(self.names, self._directions, strict=True)
                if directions is not None
            },
            "trials": {name: list(trial) for name, trial in zip(self.names, self._trials, strict=True)},
            "flushed": [self.names[slot] for slot in sorted(self._flushed)],
            "course": {
                **{key: getattr(course.control, key) for key in _COMMON},
                **{"until": course.until, "reason": course.reason},
            },
            "total": dataclasses.asdict(self._total),
        }

    def common(self) -> dict[str, Any]:
        """The part of :meth:`state` that all ranks hold alike, without arrays."""
        return {**self.state(), "residuals": {}, "memories": {}, "directions": {}, "total": None}

    def rejoin(self, common: Mapping[str, Any]) -> None:
        """Goes on among other ranks, at the step of those whose :meth:`common` this is.

        The residuals stay this worker's own.  Settings are compared anew in the next step.
        """
        self._reclaim_all()
        kept = {n: state for n, state in self._states().items() if self._choice.named(n).memory.sends_parts}
        own = {
            "residuals": kept,
            "memories": {name: self._memory(name) for name in kept},
            "scales": {
                n: s if n in kept else common["scales"][n]
                for n, s in zip(self.names, self._scales, strict=True)
            },
            "total": dataclasses.asdict(self._total),
            "first": self.names,
            "supports": {
                name: self._b.copy(support)
                for name, support in zip(self.names, self._supports, strict=True)
                if support is not None
            },
            "flushed": [],
        }
        self.restore({**common, **own}, lambda _, residual: residual)
        self._leave()

    def restore(self, state: Mapping[str, Any], place: Callable[[int, Array], Array]) -> None:
        """Continues from :meth:`state`.  ``place(slot, residual)`` copies a residual to where it lives.

        Raises ConfigurationError where the state is of other tensors or another recipe.
        """
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            raise ConfigurationError("this is no state of a compressor, or one of another version")
        if state["recipe"] != self.recipe.name:
            raise ConfigurationError(
                f"the state is of a {state['recipe']} compressor and this one is {self.recipe.name}"
            )
        differing = set(state["steps"]).symmetric_difference(self.names)
        if differing:
            raise ConfigurationError(
                f"the state and this compressor differ in the parameter {min(differing)!r}; "
                "load it into a compressor of the same model"
            )
        slots = {name: slot for slot, name in enumerate(self.names)}
        kept = {name: place(slots[name], residual) for name, residual in state["residuals"].items()}
        for name, residual in kept.items():
            length, d = self._b.length(residual), self.dimensions[name]
            if state["memories"].get(name, self._memory(name)) != self._memory(name):
                raise ConfigurationError(
                    f"the state of {name!r} is of the memory {state['memories'][name]} and this compressor's "
                    f"is {self._memory(name)}; load it into a compressor of the same memory="
                )
            if length != max(1, self._choice.named(name).memory.width) * d:
                raise ConfigurationError(
                    f"the residual of {name!r} has {length} elements and the parameter {d}; load the state "
                    "into a compressor of the same model"
                )
        known = {name: place(slots[name], x) for name, x in state["directions"].items()}
        for name, directions in known.items():
            low = self._of(name).lowrank
            if low is None or low.length != self._b.length(directions):
                raise ConfigurationError(
                    f"the state of {name!r} has directions of another rank= or shape; load it into a "
                    "compressor of the same model and options"
                )
        self._residuals = [kept.get(name) for name in self.names]
        self._steps = [int(state["steps"][name]) for name in self.names]
        self._latest = max(self._steps)
        self._since = int(state["since"])
        self._first = {slot for slot, name in enumerate(self.names) if name in state["first"]}
        self._flushed = {slot for slot, name in enumerate(self.names) if name in state["flushed"]}
        self._supports = [
            place(slot, state["supports"][name]) if name in state["supports"] else None
            for slot, name in enumerate(self.names)
        ]
        self._directions = [known.get(name) for name in self.names]
        self._trials = [Trial(*state["trials"][name]) for name in self.names]
        control = {key: state["course"][key] for key in _COMMON}
        self._course = Course(Control(**control), state["course"]["until"], state["course"]["reason"])
        self._scales = [float(state["scales"][name]) for name in self.names]
        self._unit, self._scale = float(state["unit"]), float(state["scale"])
        self._rounds, self._sent, self._away = {}, {}, set()
        self._total = Traffic(**state["total"])

    def _memory(self, name: str) -> str:
        return type(self._choice.named(name).memory).__name__


def _on_host(b: Backend, x: Array) -> np.ndarray[Any, Any]:
    return np.array(b.items(x, ballot.SIZE), dtype=np.float32)
