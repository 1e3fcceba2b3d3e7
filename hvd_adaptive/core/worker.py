"""One worker's side of a training job: the state of all its tensors, step after step.

This is what a framework's adapter wraps, and what simulated workers are made of.  It moves nothing
itself: the caller carries rings and messages between the workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import ballot, pipeline, plans
from .backend import Array, Backend
from .course import Course, advance
from .errors import ConfigurationError, SettingsMismatchError
from .policy import Control
from .recipe import Recipe
from .statistics import Statistics, Traffic
from .timing import StepClock

FORMAT = 1


class Context(NamedTuple):
    """What a tensor's way out leaves for its way back."""

    slot: int
    control: Control
    pending: pipeline.Pending | None  # None: the tensor went dense, as it is


@dataclasses.dataclass
class _Round:
    """One step of the model: what governed it, and what came of it."""

    course: Course
    tallies: dict[int, ballot.Tally] = dataclasses.field(default_factory=dict)
    sparsity: dict[str, int] = dataclasses.field(default_factory=dict)
    traffic: Traffic = Traffic()


class Worker:
    """Residuals, steps, price and counts of one worker.

    ``b``: the backend of its arrays.  ``dimensions`` maps names to numbers of elements, in the
    model's order; a tensor's position there is its slot.
    """

    def __init__(self, b: Backend, recipe: Recipe, dimensions: Mapping[str, int]) -> None:
        plans.check_names(list(dimensions))
        self._b = b
        self.recipe = recipe
        self.dimensions = dict(dimensions)
        self.names = list(dimensions)
        self.clock = StepClock()
        self._residuals: list[Array | None] = [None] * len(self.names)
        self._steps = [0] * len(self.names)
        self._rounds: dict[int, _Round] = {}
        self._course = Course()
        self._total = Traffic()
        self._ranks: list[int] = []
        self._plans: list[pipeline.Plan] = []

    # -- who takes part

    @property
    def ranks(self) -> list[int]:
        """Those that take part; empty before :meth:`meet`."""
        return self._ranks

    @property
    def compressed(self) -> list[int]:
        """The slots whose tensors are large enough to be compressed."""
        small = self.recipe.dense_below
        return [slot for slot, name in enumerate(self.names) if self.dimensions[name] >= small]

    def meet(self, ranks: Sequence[int], rank: int) -> bool:
        """Learns who takes part and which rank this is; says whether that is news."""
        if list(ranks) == self._ranks and rank == self._plans[0].rank:
            return False
        self._ranks = list(ranks)
        self._plans = list(plans.plan(self.recipe, self.dimensions, len(ranks), rank).values())
        return True

    # -- one tensor's way out and back

    def control(self, slot: int) -> Control:
        """What governs the tensor's next step."""
        step = self._steps[slot]
        tuned = self.recipe.adaptive
        compute = self.clock.compute if tuned is not None and tuned.measure else 0.0
        course = self._round(step).course
        return dataclasses.replace(course.control, step=step, compute=compute, first=step == 0)

    def outgoing(self, slot: int, gradient: Array) -> tuple[pipeline.Outgoing | None, Context]:
        """What to send of a gradient, or None for one that goes as it is.

        ``Outgoing.message`` is to be gathered where :meth:`gathers` says so.
        """
        plan, control = self._plans[slot], self.control(slot)
        round = self._round(control.step)
        if pipeline.dense(plan, control):
            round.sparsity[plan.name] = plan.dimension
            return None, Context(slot, control, None)
        if plan.recipe.memory.keeps and self._residuals[slot] is None:
            self._residuals[slot] = pipeline.residual(self._b, plan, gradient)
        outgoing, pending, self._residuals[slot] = pipeline.compress(
            self._b, plan, control, gradient, self._residuals[slot]
        )
        round.sparsity[plan.name] = int(pending.sparsity)
        return outgoing, Context(slot, control, pending)

    def gathers(self, context: Context) -> bool:
        """Whether the tensor's message of this step goes to all ranks."""
        return context.pending is not None and pipeline.gathers(self._plans[context.slot], context.control)

    def incoming(self, context: Context, ring: Array, messages: Array | None) -> Array:
        """The aggregate (float32, d elements) from the reduced ring and all ranks' messages, which
        stand one after the other.

        Raises SettingsMismatchError where the ranks' settings differ, and MessageError for a damaged
        message.
        """
        assert context.pending is not None
        self.settle(context, ring)
        plan = self._plans[context.slot]
        incoming = pipeline.Incoming(ring, messages)
        return pipeline.aggregated(self._b, plan, context.control, incoming, context.pending)

    def settle(self, context: Context, ring: Array) -> None:
        """What :meth:`incoming` does beside the aggregate: ballots are counted, residuals kept."""
        slot = context.slot
        plan, round = self._plans[slot], self._rounds[context.control.step]
        assert context.pending is not None
        tally = ballot.tally(_on_host(self._b, ring[: ballot.SIZE]), self._ranks)
        self._verify(tally)
        self._residuals[slot] = pipeline.settled(
            self._b, plan, context.control, ring, context.pending, self._residuals[slot]
        )
        if tally.nonfinite and not any(t.nonfinite for t in round.tallies.values()):
            self.count(context, Traffic(nonfinite_steps=1))
        round.tallies[slot] = tally

    def done(self, context: Context) -> None:
        """The tensor's step is over."""
        self._steps[context.slot] = context.control.step + 1
        self.clock.reduced()

    def count(self, context: Context, traffic: Traffic) -> None:
        """Adds to what the tensor's step, and all steps, have sent, received and taken."""
        self._rounds[context.control.step].traffic += traffic
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
                f"(rank {self._plans[0].rank} has {self.recipe})"
            )

    def _round(self, step: int) -> _Round:
        """The round of a step; its course follows from the ballots of the step before."""
        if step not in self._rounds:
            before = self._rounds.get(step - 1)
            if before is not None and self._plans:
                tallies = [before.tallies[slot] for slot in sorted(before.tallies)]
                dimension = sum(self._plans[slot].dimension for slot in self.compressed)
                self._course = advance(self._plans[0].recipe, max(1, dimension), before.course, tallies)
            self._rounds[step] = _Round(self._course)
            slowest = min(self._steps)
            for old in [s for s in self._rounds if s < slowest - 1]:
                del self._rounds[old]
        return self._rounds[step]

    # -- reports

    def statistics(self) -> Statistics:
        """What was sent, received and spent, in the last step and in all."""
        step = max(self._steps)
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
        """The residual of each tensor that has one: float32, d elements, this worker's own."""
        return {n: r for n, r in zip(self.names, self._residuals, strict=True) if r is not None}

    # -- checkpoints

    def state(self) -> dict[str, Any]:
        """Residuals (copies), steps, price and counts: arrays and plain numbers.  Between steps only."""
        course = self._round(max(self._steps)).course
        return {
            "format": FORMAT,
            "recipe": self.recipe.name,
            "residuals": {name: self._b.copy(residual) for name, residual in self.residuals().items()},
            "steps": dict(zip(self.names, self._steps, strict=True)),
            "course": {**dataclasses.asdict(course.control), "until": course.until, "reason": course.reason},
            "total": dataclasses.asdict(self._total),
        }

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
        for name, residual in state["residuals"].items():
            length = self._b.length(residual)
            if length != self.dimensions[name]:
                raise ConfigurationError(
                    f"the residual of {name!r} has {length} elements and the parameter "
                    f"{self.dimensions[name]}"
                )
        kept = state["residuals"]
        self._residuals = [
            place(slot, kept[name]) if name in kept else None for slot, name in enumerate(self.names)
        ]
        self._steps = [int(state["steps"][name]) for name in self.names]
        control = {f.name: state["course"][f.name] for f in dataclasses.fields(Control)}
        self._course = Course(Control(**control), state["course"]["until"], state["course"]["reason"])
        self._rounds = {}
        self._total = Traffic(**state["total"])


def _on_host(b: Backend, x: Array) -> np.ndarray[Any, Any]:
    return np.array(b.items(x, ballot.SIZE), dtype=np.float32)
