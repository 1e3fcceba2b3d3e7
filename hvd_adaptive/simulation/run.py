"""A training run by simulated workers, with the time that a link would have taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ..core.cost import DenseBits, LinkTime
from ..core.ensemble import Ensemble
from ..core.recipe import Recipe
from ..torch.backend import TORCH
from .tasks import Task

WINDOW = 5
"""Checks whose mean held-out loss is compared with a target: one check alone is noisy, and a method must
not win by the luck of one."""


@dataclass
class Trace:
    """What happened, step by step: lists of equal length, and the held-out losses beside them.

    ``bits``: received by a worker per step, ballots included; ``wire``: the same, where values on a ring
    count as often as they pass, 2 (n - 1)/n times (where nothing is given, as ``bits``); ``sparsity``:
    coordinates sent by worker 0; ``dense``: whether those were all.
    """

    bits: list[int] = field(default_factory=list)
    sparsity: list[int] = field(default_factory=list)
    dense: list[bool] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    checked: list[tuple[int, float]] = field(default_factory=list)
    wire: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.wire = self.wire or list(map(float, self.bits))

    def elapsed(self, link: LinkTime) -> float:
        """Seconds so far over a link."""
        return sum(step_time(link, b, d) for b, d in zip(self.wire, self.dense, strict=True))

    def steps_to(self, target: float) -> float | None:
        """Steps until the mean held-out loss of the last ``WINDOW`` checks first fell to ``target``,
        interpolated; None if never."""
        before: tuple[int, float] | None = None
        for position, (step, _) in enumerate(self.checked):
            lately = [loss for _, loss in self.checked[max(0, position + 1 - WINDOW) : position + 1]]
            loss = sum(lately) / len(lately)
            if loss <= target:
                if before is None:
                    return float(step)
                span = (before[1] - target) / (before[1] - loss)
                return before[0] + span * (step - before[0])
            before = (step, loss)
        return None

    def time_to(self, target: float, link: LinkTime) -> float | None:
        """Seconds until then over a link (its ``compute`` is the time of a step without one)."""
        steps = self.steps_to(target)
        if steps is None:
            return None
        whole = int(steps)
        spent = sum(step_time(link, b, d) for b, d in zip(self.wire[:whole], self.dense, strict=False))
        if whole < len(self.bits):
            spent += (steps - whole) * step_time(link, self.wire[whole], self.dense[whole])
        return spent


def step_time(link: LinkTime, bits: float, dense: bool) -> float:
    """Seconds of a step in which a worker received ``bits`` on the wire, or, in a dense step, as result."""
    if dense:  # a ring allreduce moves 2 (n - 1)/n of what it returns, in twice as many hops
        n = link.world_size
        return link.compute + 2 * (n - 1) * link.latency + 2 * (n - 1) / n * bits / link.bandwidth
    return link.compute + (link.world_size - 1) * link.latency + bits / link.bandwidth


def link_of_ratio(ratio: float, dimension: int, world_size: int, compute: float = 1.0) -> LinkTime:
    """The link over which a dense exchange of ``dimension`` float32 takes ``ratio`` times the
    ``compute`` of a step."""
    unit = LinkTime(DenseBits(dimension), 1.0, world_size=world_size, collective="allreduce")
    seconds = float(unit(dimension))
    return LinkTime(DenseBits(dimension), seconds / (ratio * compute), compute=compute, world_size=world_size)


def train(
    task: Task,
    recipe: Recipe,
    *,
    workers: int = 4,
    steps: int,
    seed: int = 0,
    check_every: int = 10,
    until: float | None = None,
) -> Iterator[Trace]:
    """Trains, yielding the same growing trace after every step.

    Stops after ``steps``, or at the check where the target ``until`` is reached.
    """
    torch.manual_seed(seed)
    model = task.model()
    parameters = list(model.parameters())
    optimizer = task.optimizer(parameters)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    dimension = sum(p.numel() for p in parameters)
    ensemble = Ensemble(TORCH, recipe, shapes, workers)
    streams = [task.batches(rank, seed) for rank in range(workers)]
    trace = Trace()
    for step in range(steps):
        gradients, losses = [], []
        for stream in streams:
            loss = task.loss(model, next(stream))
            gradients.append(torch.autograd.grad(loss, parameters))
            losses.append(loss.item())
        with torch.no_grad():
            for parameter, mean in zip(parameters, ensemble.reduce(gradients), strict=True):
                parameter.grad = mean.view_as(parameter)
        optimizer.step()
        report = ensemble.workers[0].statistics()
        trace.bits.append(report.last.bits_received)
        trace.sparsity.append(sum(report.sparsity.values()))
        trace.dense.append(trace.sparsity[-1] == dimension)
        trace.wire.append(trace.bits[-1] + (2 * (workers - 1) / workers - 1) * 32 * ensemble.riding)
        trace.train_loss.append(sum(losses) / workers)
        if (step + 1) % check_every == 0:
            with torch.no_grad():
                trace.checked.append((step + 1, task.loss(model, task.held_out).item()))
        yield trace
        if until is not None and (step + 1) % check_every == 0 and trace.steps_to(until) is not None:
            return
