"""Which ranks share a host, and what follows from it.

A host here is what can share memory: one kernel and one network namespace, since that is the reach of the sockets.
Host names do not count: containers may all have the same one, or each its own. Two containers on one machine are
two hosts, unless they share its network (docker run --network=host).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minddp.transport.shared_memory.rendezvous import Group


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
        """How many ranks every host has at least. See [Note: reduce, cross, copy]."""
        return min(map(len, self.ranks))

    @property
    def is_one_rank_each(self) -> bool:
        return max(map(len, self.ranks)) == 1

    def ranks_beside(self, rank: int) -> tuple[int, ...]:
        """All ranks on this rank's host, itself included. Its index among them is its local rank."""
        return next(ranks for ranks in self.ranks if rank in ranks)

    def lane(self, local_rank: int) -> list[int]:
        """The ranks with this local rank, host by host; it is below `num_lanes`."""
        return [ranks[local_rank] for ranks in self.ranks]

    def __str__(self) -> str:
        return " | ".join(" ".join(map(str, ranks)) for ranks in self.ranks)


class RanksOfOneHost:
    """Some ranks of `group` as a group of their own. All of `group` must make its calls at the same time."""

    def __init__(self, group: Group, ranks: Sequence[int]):
        self._group = group
        self._ranks = ranks
        self.rank = ranks.index(group.rank)
        self.world_size = len(ranks)

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        gathered = self._group.all_gather(tensor)
        return [gathered[rank] for rank in self._ranks]
