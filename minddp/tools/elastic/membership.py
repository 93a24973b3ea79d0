"""Which ranks train together, and which steps count: decided once each in a store that outlives all ranks.

[Note: generations]
A process of the job is a *member*, known by its process ID. A *generation* is a list of members, the ranks in
order. It is called off when a member is lost or another process asks to join. Then its members ask to join the next
one. The first process that finds that each of them has asked or is lost proposes the list, and the first proposal
in the store is settled. A process that is not on the list asks for the next one.

    store                     written by
    ------------------------  ------------------------------------------------------------------
    join_requests/G           members that ask to join generation G, in order
    generation/G              settled once: its members
    over/G                    any process: generation G is called off
    votes/G/S, verdict/G/S    how many members have voted for step S; settled once: does it count?
    finished                  the last step has counted
    left/M                    member M: it does not train any more, but may still run

[Note: the vote]
A rank that has the averages cannot know whether all others have them. If one rank steps its optimizer and another
computes the step again, their replicas differ. So at the end of `ddp.shares()`, when gradients and buffers are
complete, each rank votes in the store. The last one proposes the verdict "counts". A rank that notices a loss
proposes the verdict "again". The first verdict is settled, and all ranks obey it. After "counts" the remaining
ranks step their optimizers, even if others die then; after "again" they compute the step again.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from minddp.platform.host import is_running
from minddp.platform.store import Messages, value_now


@dataclass(frozen=True)
class Generation:
    """The members in `joined` need the state of rank 0."""

    number: int = 0
    members: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()


def next_generation(last: Generation, requests: Mapping[int, bool]) -> Generation:
    """Members with the state in their order, then the others. For `requests`, see `Membership.join_requests`."""
    survivors = [member for member in last.members if requests.get(member)]
    joiners = [member for member in requests if member not in survivors]
    members = (*survivors, *joiners)
    joined = tuple(member for member in members[1:] if member in joiners)
    return Generation(last.number + 1, members, joined)


class Membership(Messages):
    """The store, as this process sees it. During `vote`, another thread needs another connection."""

    def __init__(self, store: dist.Store):
        super().__init__(store, "elastic", os.getpid(), 0)  # the number of members is not fixed
        self.member = self.rank

    def request_join(self, number: int, *, has_state: bool) -> None:
        """This member will take part in the generation with this number, unless it dies.

        `has_state`: it has the state that the last generation has computed, or agreed on at its start.
        """
        self.store.delete_key(self._name("left", self.member))  # by an earlier process with this ID
        self.store.append(self._name("join_requests", number), f"{self.member}/{has_state:d} ")  # type: ignore[attr-defined]

    def join_requests(self, number: int) -> dict[int, bool]:
        """`has_state` by member, in order."""
        requests = (value_now(self.store, self._name("join_requests", number)) or b"").split()
        return {int(member): has_state == b"1" for member, has_state in (each.split(b"/") for each in requests)}

    def takes_part(self, member: int) -> bool:
        """False once `member` is lost: its process has ended, or has left the training."""
        return is_running(member) and not self.settled("left", member)

    def vote(self, generation: Generation, step: int) -> str:
        """Vote for `step`, and return the verdict once it is settled: "counts", "again", or "counts, regroup".

        The last one means that other processes ask to join.
        """
        number = generation.number
        if self.count("votes", number, step) < len(generation.members):
            verdict: str = pickle.loads(self.store.get(self._name("verdict", number, step)))
            return verdict
        for kind in ("votes", "verdict"):  # all have voted since, and so have read it
            self.store.delete_key(self._name(kind, number, step - 1))
        proposed = "counts, regroup" if self.join_requests(number + 1) else "counts"
        verdict = self.settle(proposed, "verdict", number, step)
        return verdict
