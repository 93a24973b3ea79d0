"""Which ranks train together: generations of members, decided once each in a store that outlives all of them.

[Note: generations]
A process is a *member*, with a number that never repeats. A *generation* is a list of members, the ranks in order.
It is called off when a member is lost or another process asks to join. Then its members ask to join the next one.
The first process that finds that each of them has asked or is lost proposes the list, and the first proposal in the
store is settled. A process that is not on the list, or was taken for lost, asks for the next one.

    store                     written by
    ------------------------  ------------------------------------------------------------------
    ids                       a counter
    members/process/M, beat/M member M: where it runs; a number that changes while it lives
    join_requests/G           members that ask to join generation G, in order
    members/generation/G      settled once: members, source, ...
    come/G/R                  rank R of generation G, as it begins to connect
    over/G                    any process: generation G is called off
    votes/G/S, verdict/G/S    see [Note: the vote] in session.py
    finished                  the last step has counted
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from minddp.platform.rank_processes import RankProcesses
from minddp.platform.store import Messages, value_now


@dataclass(frozen=True)
class Generation:
    """The members in `joined` need the state of `source`."""

    number: int = 0
    members: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    source: int = 0


class JoinRequest(NamedTuple):
    """`has_state`: the member has the state that the last generation has computed, or agreed on at its start."""

    step: int
    has_state: bool


def next_generation(last: Generation, requests: Mapping[int, JoinRequest], max_members: int) -> Generation:
    """Members with the state in their order, then others while there is room. The source has the latest step."""
    survivors = [member for member in last.members if member in requests and requests[member].has_state]
    joiners = [member for member in requests if member not in survivors]
    members = (*survivors, *joiners)[:max_members]
    source = max(survivors or members, key=lambda member: requests[member].step)
    joined = tuple(member for member in members if member not in survivors)
    return Generation(last.number + 1, members, joined, source)


class Membership:
    """The store, as the process `member` sees it, by default a new member. For use by one thread."""

    def __init__(self, store: dist.Store, member: int | None = None):
        self.store = store
        self.member = store.add("ids", 1) if member is None else member
        self._messages = Messages(store, "members", self.member, 0)  # their number is not fixed
        self.processes = RankProcesses(self._messages)
        if member is None:
            store.set(f"beat/{self.member}", "0")
            self.processes.post()

    def decided(self, number: int) -> Generation | None:
        """The first proposal of any process for generation `number`, or `None` if there is none yet."""
        generation: Generation | None = self._messages.settled("generation", number)
        return generation

    def propose(self, generation: Generation) -> None:
        self._messages.settle(generation, "generation", generation.number)

    def request_join(self, number: int, step: int, *, has_state: bool) -> None:
        """This member will take part in the generation with this number, unless it dies."""
        request = f"{self.member}/{step}/{has_state:d} "
        self.store.append(f"join_requests/{number}", request)  # type: ignore[attr-defined]

    def join_requests(self, number: int) -> dict[int, JoinRequest]:
        """By member, in order."""
        requests = (
            map(int, request.split("/")) for request in (self.read(f"join_requests/{number}") or "").split()
        )
        return {member: JoinRequest(step, bool(has_state)) for member, step, has_state in requests}

    def read(self, key: str) -> str | None:
        value = value_now(self.store, key)
        return None if value is None else value.decode()
