"""Which ranks train together: generations of members, decided once each in a store that outlives all of them.

[Note: generations]
A process is a *member* by a number that never repeats. A *generation* is a list of members; each member's place in
it is its rank. A generation is called off when a member is lost, or another one asks to join. Then each of its
members announces itself for the next one, as a rule at once. The first process that finds every member announced
or lost proposes the list: `compare_set` lets one proposal win, which all obey. A member that is not on it was
taken for lost, as after a long stop: it knocks and joins again. So does a new process, once it can train.

    store                  written by
    ---------------------  ---------------------------------------------------------------------
    ids                    a counter
    process/M, beat/M      member M: where it runs; a number that changes while it lives
    left/M                 member M, if it exits cleanly
    knocks                 members that have asked to join, in order, and the step that each was at then
    here/G/M               member M, for generation G: the step that it is at; whether it has the state
    generation/G           decided once: members, source, ...
    come/G/R               rank R of generation G, as it begins to connect
    over/G                 any process: generation G is called off
    votes/G/S, verdict/G/S see [Note: the vote] in session.py
    finished               the last step has counted
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from minddp.platform.host import host_identity, is_running
from minddp.platform.store import value_now


@dataclass(frozen=True)
class Generation:
    """`joined` are those of `members` that need the state of `source`, which is at `step`.

    `num_knocks` of all that have asked to join were considered.
    """

    number: int = 0
    members: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    source: int = 0
    step: int = 0
    num_knocks: int = 0

    @classmethod
    def from_json(cls, text: str | bytes) -> Generation:
        fields = json.loads(text)
        return cls(**{**fields, "members": tuple(fields["members"]), "joined": tuple(fields["joined"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def next_generation(
    last: Generation,
    steps_of_survivors: Mapping[int, int],
    steps_of_joiners: Mapping[int, int],
    num_knocks: int,
    max_members: int,
) -> Generation:
    """Survivors in their order, then joiners while there is room. The source is one that has come furthest."""
    steps = {**steps_of_survivors, **{m: s for m, s in steps_of_joiners.items() if m not in steps_of_survivors}}
    members = tuple(steps)[:max_members]
    joined = tuple(m for m in members if m not in steps_of_survivors)
    source = max(members, key=lambda member: steps[member])
    return Generation(last.number + 1, members, joined, source, steps[source], num_knocks)


class Membership:
    """What is in the store, for the process that is `member`, by default a new one. One thread uses it."""

    def __init__(self, store: dist.Store, member: int | None = None):
        self.store = store
        self.member = store.add("ids", 1) if member is None else member
        self._here = host_identity("pid")
        self._processes: dict[int, str] = {}
        if member is None:
            store.set(f"beat/{self.member}", "0")
            store.set(f"process/{self.member}", f"{self._here}/{os.getpid()}")
            store.append("knocks", "")  # type: ignore[attr-defined]  # so that it can be read

    # ------------------------------------------------------------------ generations

    def latest(self, known: Generation) -> Generation:
        """The last generation that was decided; `known` is one that was."""
        while (record := self.read(f"generation/{known.number + 1}")) is not None:
            known = Generation.from_json(record)
        return known

    def decide(self, proposal: Generation) -> Generation:
        """This one, or the one that another process has proposed before."""
        return Generation.from_json(self.store.compare_set(f"generation/{proposal.number}", "", proposal.to_json()))

    def announce(self, generation: int, step: int, *, has_state: bool) -> None:
        """This member will take part in the generation with this number, unless it dies.

        `has_state`: it has what the last generation has computed, or has agreed on at its begin.
        """
        self.store.set(f"here/{generation}/{self.member}", json.dumps([step, has_state]))

    def announced(self, generation: int, member: int) -> tuple[int, bool] | None:
        """The step that the member is at, if it has announced itself, and whether it has the state."""
        announcement = self.read(f"here/{generation}/{member}")
        return None if announcement is None else tuple(json.loads(announcement))

    def knock(self, step: int) -> int:
        """Ask to join. Returns the place of this request among all."""
        self.store.append("knocks", f"{self.member}/{step} ")  # type: ignore[attr-defined]
        members = [member for member, _ in self.knocks()]
        return len(members) - members[::-1].index(self.member)

    def knocks(self) -> list[tuple[int, int]]:
        """All requests to join, in order: the member, and the step that it was at."""
        requests = (knock.split("/") for knock in self.store.get("knocks").decode().split())
        return [(int(member), int(step)) for member, step in requests]

    # ------------------------------------------------------------------ life and death

    def process_is_gone(self, member: int) -> bool:
        """Asks this host only. Nothing is known of processes elsewhere."""
        if member not in self._processes:
            self._processes[member] = self.store.get(f"process/{member}").decode()
        process_table, _, pid = self._processes[member].rpartition("/")
        return process_table == self._here and not is_running(int(pid))

    def beats(self, members: Sequence[int]) -> list[bytes]:
        return self.store.multi_get([f"beat/{member}" for member in members])  # type: ignore[attr-defined]

    def read(self, key: str) -> str | None:
        value = value_now(self.store, key)
        return None if value is None else value.decode()
