"""Ranks on hosts: who reduces with whom, and who speaks for a host about which tensor.

Inside a host, links are fast and gradients are reduced densely.  Between hosts, every tensor has one
speaker per host, which sends for all of it, so that what crosses the links shrinks by the number of
ranks per host.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .errors import ConfigurationError


@dataclass(frozen=True)
class Hierarchy:
    """The ranks of each host: hosts in the order of their first ranks, as many ranks on each."""

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, local_ranks: Sequence[int]) -> Hierarchy:
        """From the local rank of each rank, in rank order; a launcher numbers those of a host in a row.

        Raises ConfigurationError for one rank per host, and where hosts have unequal numbers of ranks.
        """
        ranks: list[list[int]] = []
        for rank, local in enumerate(local_ranks):
            if local == 0:
                ranks.append([])
            if not ranks or local != len(ranks[-1]):
                raise ConfigurationError(
                    f"local ranks {list(local_ranks)} are not 0, 1, ... for one host after the other: "
                    "start with horovodrun -H a:2,b:2"
                )
            ranks[-1].append(rank)
        counts = {len(members) for members in ranks}
        if len(counts) > 1:
            raise ConfigurationError(
                f"hosts have {min(counts)} to {max(counts)} ranks each; hierarchical mode needs as many on "
                "each: horovodrun -H a:2,b:2"
            )
        if counts == {1}:
            raise ConfigurationError(
                "hierarchical mode needs two or more ranks per host; with one each, use the same recipe of "
                "Compression"
            )
        return cls(tuple(map(tuple, ranks)))

    @property
    def ranks_per_host(self) -> int:
        return len(self.hosts[0])

    @property
    def inside(self) -> list[tuple[int, ...]]:
        """The ranks that reduce densely with each other: those of each host."""
        return list(self.hosts)

    @property
    def across(self) -> list[tuple[int, ...]]:
        """The ranks that compress with each other: the speakers of all hosts for the same tensors."""
        return list(zip(*self.hosts, strict=True))

    def place(self, rank: int) -> tuple[int, int]:
        """The host of a rank (its position in ``hosts``), and the rank's position on it."""
        for host, members in enumerate(self.hosts):
            if rank in members:
                return host, members.index(rank)
        raise ConfigurationError(f"rank {rank} is on none of the {len(self.hosts)} hosts")


def speakers(dimensions: Mapping[str, int], ranks_per_host: int) -> dict[str, int]:
    """For each tensor the position, on its host, of the rank that speaks for it.

    The largest tensor first, each to the rank that has least so far (Graham's rule: the busiest rank has
    at most 4/3 of what the best division would give it).  The same on all ranks.
    """
    loads = [(0, position) for position in range(ranks_per_host)]
    chosen: dict[str, int] = {}
    order = {name: index for index, name in enumerate(dimensions)}
    for name in sorted(dimensions, key=lambda name: (-dimensions[name], order[name])):
        load, position = heapq.heappop(loads)
        chosen[name] = position
        heapq.heappush(loads, (load + dimensions[name], position))
    return {name: chosen[name] for name in dimensions}
