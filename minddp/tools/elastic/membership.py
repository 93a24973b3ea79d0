"""Which ranks train together: generations of members, decided once each in a store that outlives all of them.

[Note: generations]
A process is a *member*, with a number that never repeats. A *generation* is a list of members; the place of a
member in it is its rank. A generation is called off when a member is lost, or another process asks to join. Then
each of its members announces itself for the next one, usually at once. The first process that finds every member
announced or lost proposes the list; the first proposal is settled in the store, and all members follow it. A member
that is not on the list was taken for lost, as after a long pause: it asks to join again. So does a new process,
once it can train.

    store                     written by
    ------------------------  ------------------------------------------------------------------
    ids                       a counter
    members/process/M, beat/M member M: where it runs; a number that changes while it lives
    left/M                    member M, if it exits cleanly
    knocks                    members that have asked to join, in order, each with its step then
    members/here/G/M          member M, for generation G: its step; whether it has the state
    members/generation/G      settled once: members, source, ...
    come/G/R                  rank R of generation G, as it begins to connect
    over/G                    any process: generation G is called off
    votes/G/S, verdict/G/S    see [Note: the vote] in session.py
    finished                  the last step has counted
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from minddp.platform.rank_processes import RankProcesses
from minddp.platform.store import Messages, value_now


@dataclass(frozen=True)
class Generation:
    """The members in `joined` need the state of `source`, which is at `step`.

    `num_knocks`: how many requests to join were considered.
    """

    number: int = 0
    members: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    source: int = 0
    step: int = 0
    num_knocks: int = 0


def next_generation(
    last: Generation,
    steps_of_survivors: Mapping[int, int],
    steps_of_joiners: Mapping[int, int],
    num_knocks: int,
    max_members: int,
) -> Generation:
    """Survivors in their order, then joiners while there is room. The source is a member with the latest step."""
    steps = {**steps_of_survivors, **{m: s for m, s in steps_of_joiners.items() if m not in steps_of_survivors}}
    members = tuple(steps)[:max_members]
    joined = tuple(m for m in members if m not in steps_of_survivors)
    source = max(members, key=lambda member: steps[member])
    return Generation(last.number + 1, members, joined, source, steps[source], num_knocks)


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
            store.append("knocks", "")  # type: ignore[attr-defined]  # so that it can be read

    # ------------------------------------------------------------------ generations

    def latest(self, known: Generation) -> Generation:
        """The latest generation that was decided, at least `known`."""
        while (record := self._messages.settled("generation", known.number + 1)) is not None:
            known = record
        return known

    def decide(self, proposal: Generation) -> Generation:
        """The first proposal of any process for this number."""
        decided: Generation = self._messages.settle(proposal, "generation", proposal.number)
        return decided

    def announce(self, generation: int, step: int, *, has_state: bool) -> None:
        """This member will take part in the generation with this number, unless it dies.

        `has_state`: it has the state that the last generation has computed, or agreed on at its beginning.
        """
        self._messages.post((step, has_state), "here", generation)

    def announced(self, generation: int, member: int) -> tuple[int, bool] | None:
        """The member's step, and whether it has the state; `None` if it has not announced itself."""
        announcement: tuple[int, bool] | None = self._messages.read(member, "here", generation)
        return announcement

    def knock(self, step: int) -> int:
        """Ask to join. Returns the place of this request among all requests."""
        self.store.append("knocks", f"{self.member}/{step} ")  # type: ignore[attr-defined]
        members = [member for member, _ in self.knocks()]
        return len(members) - members[::-1].index(self.member)

    def knocks(self) -> list[tuple[int, int]]:
        """All requests to join, in order: the member and its step."""
        requests = (knock.split("/") for knock in self.store.get("knocks").decode().split())
        return [(int(member), int(step)) for member, step in requests]

    # ------------------------------------------------------------------ life and death

    def beats(self, members: Sequence[int]) -> list[bytes]:
        return self.store.multi_get([f"beat/{member}" for member in members])  # type: ignore[attr-defined]

    def read(self, key: str) -> str | None:
        value = value_now(self.store, key)
        return None if value is None else value.decode()
