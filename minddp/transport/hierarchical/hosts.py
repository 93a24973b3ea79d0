"""Which ranks share a host, and what follows from it: arithmetic on names that the ranks have told each other.

A host here is what can share memory: one kernel, and one network namespace, since that is how far its sockets
reach. Its host name does not count. Containers may all have the same, or each its own; two containers on one
machine are two hosts, unless they share its network (docker run --network=host).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minddp.transport.shared_memory.rendezvous import Meeting


@dataclass(frozen=True)
class Place:
    """Where a rank is: its host's number, and its own number among the ranks of that host."""

    host: int
    seat: int


@dataclass(frozen=True)
class Hosts:
    """`ranks[h]` are the ranks on host h, ascending. Hosts are in the order of their lowest ranks."""

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def grouped(cls, names: Sequence[str]) -> Hosts:
        """From the name of each rank's host, in rank order."""
        ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            ranks.setdefault(name, []).append(rank)
        return cls(tuple(map(tuple, ranks.values())))

    @property
    def num_lanes(self) -> int:
        """How many ranks every host has at least. See [Note: add up, cross, spread]."""
        return min(map(len, self.ranks))

    @property
    def all_alone(self) -> bool:
        """Each rank on a host of its own."""
        return max(map(len, self.ranks)) == 1

    def place_of(self, rank: int) -> Place:
        return next(Place(host, ranks.index(rank)) for host, ranks in enumerate(self.ranks) if rank in ranks)

    def lane(self, seat: int) -> list[int]:
        """The ranks that have this seat, host by host; `seat` is below `num_lanes`."""
        return [ranks[seat] for ranks in self.ranks]

    def __str__(self) -> str:
        return " | ".join(" ".join(map(str, ranks)) for ranks in self.ranks)


class Neighbours:
    """The ranks of one host as a group of their own, in so far as they only want to hear from each other.

    What they say goes through the group of all, so all hosts must do the same at the same time.
    """

    def __init__(self, group: Meeting, ranks: Sequence[int]):
        self._group = group
        self._ranks = ranks

    @property
    def rank(self) -> int:
        """Our seat."""
        return self._ranks.index(self._group.rank)

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        gathered = self._group.all_gather(tensor)
        return [gathered[rank] for rank in self._ranks]
