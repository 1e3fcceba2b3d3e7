"""What a compressor knows about a model's tensors before it sees a gradient."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ConfigurationError
from .pipeline import Plan
from .recipe import Recipe, restate

_instances = itertools.count()


def tag(name: str | None) -> str:
    """The prefix of a compressor's collective names.

    Ranks make their compressors in the same order, so a counter gives them the same tag; a name of
    the user's serves where they do not.
    """
    return f"hvd_adaptive.{name if name is not None else next(_instances)}"


def check_names(names: Sequence[str]) -> None:
    """Raises ConfigurationError where there is no tensor, or two share a name."""
    if not names:
        raise ConfigurationError(
            "named_parameters is empty; pass model.named_parameters() afresh (a generator that was "
            "read once yields nothing the second time)"
        )
    twice = sorted({n for n in names if list(names).count(n) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ConfigurationError(f"named_parameters holds two tensors of the name {twice[0]!r}")


def plan(recipe: Recipe, dimensions: Mapping[str, int], world_size: int, rank: Any) -> dict[str, Plan]:
    """A plan for each tensor: ``dimensions`` maps names to numbers of elements, in model order.

    ``rank``: this worker's among all, a number or a scalar array.
    """
    total = sum(dimensions.values())
    restated = restate(recipe, total, world_size)
    fingerprint = recipe.fingerprint()
    return {
        name: Plan(name, dimension, dimension / total, restated, world_size, rank, fingerprint)
        for name, dimension in dimensions.items()
    }


def buckets(dimensions: Sequence[int], number: int) -> list[list[int]]:
    """Positions of the tensors in at most ``number`` groups of about equal size, last tensors first.

    Backward passes finish the last layers first, so the first group is complete, and on its way,
    while the rest is still computed.
    """
    groups: list[list[int]] = [[] for _ in range(number)]
    total, seen = sum(dimensions), 0
    for position in reversed(range(len(dimensions))):
        groups[min(number - 1, seen * number // max(1, total))].append(position)
        seen += dimensions[position]
    return [group for group in groups if group]
