"""What a compressor knows about a model's tensors before it sees a gradient."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from .errors import ConfigurationError
from .link import Link
from .pipeline import Plan
from .policy import Led
from .recipe import Recipe, fingerprint, from_config, restate

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


@dataclass(frozen=True)
class Choice:
    """Which recipe each tensor has: ``recipe``, or the first of ``overrides``, pairs of a pattern (as
    in :mod:`fnmatch`) and a recipe, that matches its name.  Two ranks' must be equal."""

    recipe: Recipe
    overrides: tuple[tuple[str, Recipe], ...] = ()

    @property
    def fingerprint(self) -> int:
        """Differs where choices do."""
        return fingerprint(self.recipe, self.overrides)

    @property
    def auto(self) -> bool:
        """Whether the link is to be measured."""
        tuned = (recipe.adaptive for recipe in (self.recipe, *(r for _, r in self.overrides)))
        return any(policy is not None and policy.auto for policy in tuned)

    @property
    def energy(self) -> bool:
        """Whether a price is improvement per cost, in squared units of the gradients."""
        tuned = (recipe.adaptive for recipe in (self.recipe, *(r for _, r in self.overrides)))
        return any(policy is not None and policy.objective == "energy" for policy in tuned)

    def named(self, name: str) -> Recipe:
        """The recipe of the tensor called ``name``, whatever its shape."""
        return next((r for pattern, r in self.overrides if fnmatchcase(name, pattern)), self.recipe)

    def of(self, name: str, shape: Sequence[int]) -> Recipe:
        """The recipe of the tensor called ``name``, fitted to its shape."""
        return self.named(name).fitted(shape)

    def overriding(self, names: Sequence[str]) -> dict[str, Recipe]:
        """The overrides that match one of ``names``, a part of the names that the choice was made for."""
        return {p: r for p, r in self.overrides if any(fnmatchcase(name, p) for name in names)}


def choose(recipe: Any, overrides: Mapping[str, Any] | None, names: Sequence[str]) -> Choice:
    """The choice for the tensors called ``names``; recipes may be given as :func:`from_config` takes them.

    Raises ConfigurationError for a pattern that matches no tensor, and where two adaptive recipes
    reckon with different costs or objectives.
    """
    pairs = []
    for pattern, config in dict(overrides or {}).items():
        try:
            pairs.append((str(pattern), from_config(config)))
        except ConfigurationError as error:
            raise ConfigurationError(f"overrides[{pattern!r}]: {error}") from error
        if not any(fnmatchcase(name, pattern) for name in names):
            close = difflib.get_close_matches(pattern.strip("*"), names, 1, 0.0)
            raise ConfigurationError(
                f"overrides: {pattern!r} matches no parameter; the nearest is {close[0]!r}"
            )
    choice = Choice(from_config(recipe), tuple(pairs))
    tuned = [tuned for tuned in (choice.named(name).adaptive for name in names) if tuned is not None]
    if len({(one.cost, one.objective, one.share) for one in tuned}) > 1:
        raise ConfigurationError(
            "overrides: one price tunes all adaptive tensors, so give every adaptive recipe the same cost=, "
            "objective= and share="
        )
    return choice


def gathering(choice: Choice) -> Choice:
    """The choice where there is no ring with a named support: what would be free to take it gathers.

    Raises ConfigurationError where it was asked for.
    """

    def without(recipe: Recipe) -> Recipe:
        if not isinstance(recipe.policy, Led):
            return recipe
        if not recipe.policy.auto:
            raise ConfigurationError("transport='ring' is there for torch only; use 'allgather' here")
        return dataclasses.replace(recipe, policy=recipe.policy.then)

    return Choice(without(choice.recipe), tuple((p, without(r)) for p, r in choice.overrides))


def plan(
    choice: Choice,
    shapes: Mapping[str, Sequence[int]],
    world_size: int,
    rank: Any,
    link: Link | None = None,
    position: int = 0,
) -> dict[str, Plan]:
    """A plan for each tensor: ``shapes`` maps names to shapes, in model order.

    ``rank``: this worker's among all, a number or a scalar array.  ``link``: where it was measured.
    ``position``: this worker's among those that take part.
    """
    dimensions = {name: math.prod(shape) for name, shape in shapes.items()}
    recipes = {name: choice.of(name, shape) for name, shape in shapes.items()}
    tuned = [n for n, r in recipes.items() if r.adaptive is not None and not r.spares(dimensions[n])]
    total = max(1, sum(dimensions[name] for name in tuned))
    mark = choice.fingerprint
    return {
        name: Plan(
            name,
            dimension,
            dimension / total if name in tuned else 0.0,
            restate(recipes[name], total, world_size, link),
            world_size,
            rank,
            mark,
            position,
        )
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
