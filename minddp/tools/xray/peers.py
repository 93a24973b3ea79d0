"""Gathering the ranks' recordings on the first rank that recorded, on one clock.

[Note: which ranks record]
Any set of ranks may record, and no rank knows which others do. A collective would hang if one rank did not take
part, so the ranks agree through the store, where no rank waits for another. Each rank posts a message when it
begins to record. When one rank has recorded a synchronised step to its end, all others have begun that step, so
every rank that records it has posted its message. The first rank to stop proposes the list of these ranks, and the
list is settled for all. Only these ranks open a gloo group of their own. Every wait in it has a limit; after the
limit each rank keeps its own recording alone, with a note that says so.

[Note: one clock]
Processes of one machine read the same clock. On another machine a rank asks the first rank for the time, again and
again: it reads its own clock when a question leaves and when its answer arrives, and the first rank reads its own
in between. The quickest answer counts; half of its time is the largest possible error (Cristian, 1989).
"""

from __future__ import annotations

import datetime
import os
import pickle
import socket
import time
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist

from minddp.platform import wording
from minddp.platform.host import boot_id, namespace
from minddp.platform.store import Messages
from minddp.tools.xray.recording import RankRecording
from minddp.tools.xray.sources import Source

ROUND_TRIPS = 32  # they take some milliseconds

now_ns = time.perf_counter_ns  # a monotonic clock with an arbitrary zero

# The recordings on this rank, notes for the page, and whether this rank has all recordings.
Gathered = tuple[tuple[RankRecording, ...], tuple[str, ...], bool]


class Peers:
    """The ranks that record, as seen by one of them. See [Note: which ranks record]."""

    def __init__(self, source: Source, limit_s: float):
        self._rank, self._world_size, self._limit_s = source.rank, source.world_size, limit_s
        self._messages: Messages | None = None
        if (store := source.store) is not None:  # a rank may begin several times before the same step
            self._messages = Messages.open(store, source.topic, self._rank, self._world_size)
            self._messages.post(clock_identity(), "records")

    def gather(self, ours: RankRecording) -> Gathered:
        """All recordings on the first rank, on its clock; only `ours` on the others."""
        clocks = self._agree()
        members = sorted(clocks)
        if len(members) == 1:
            return (ours,), self._notes(members), True
        try:
            group = self._open_group(members)
            if members[0] != self._rank:
                _send(group, ours if clocks[members[0]] == clocks[self._rank] else on_clock_of_first(group, ours))
                return (ours,), (), False
            others = []
            for peer, rank in enumerate(members[1:], 1):
                if clocks[rank] != clocks[self._rank]:
                    answer_time(group, peer)
                others.append(_receive(group, peer))
        except RuntimeError as error:
            note = (
                f"{wording.ranks(members).capitalize()} recorded, but could not meet within {self._limit_s:g} "
                f"s, so this is rank {self._rank} alone ({str(error).splitlines()[0]})."
            )
            return (ours,), (note,), True
        return (ours, *others), self._notes(members), True

    def leave(self) -> None:
        """This rank has failed. If it is the first to stop, no other rank will wait for it."""
        self._agree(without_us=True)

    def _agree(self, *, without_us: bool = False) -> dict[int, str]:
        """The clocks of the ranks that will meet; only this rank's if it is not one of them."""
        alone = {self._rank: ""}
        if self._messages is None:
            return alone
        present = self._messages.gather("records", limit_s=0.0)
        proposal = {rank: clock for rank, clock in present.items() if not (without_us and rank == self._rank)}
        members: dict[int, str] = self._messages.settle(proposal, "members")
        return members if self._rank in members else alone

    def _open_group(self, members: list[int]) -> dist.ProcessGroup:
        assert self._messages is not None
        store = dist.PrefixStore(f"{self._messages.topic}/group", self._messages.store)
        limit = datetime.timedelta(seconds=self._limit_s)
        opened = dist.ProcessGroupGloo(store, members.index(self._rank), len(members), limit)
        return cast("dist.ProcessGroup", opened)

    def _notes(self, members: list[int]) -> tuple[str, ...]:
        silent = [rank for rank in range(self._world_size) if rank not in members]
        if not silent:
            return ()
        return (
            f"{wording.ranks(silent).capitalize()} did not record: when it launched buckets is not known, so "
            f"waiting for that looks like slow communication.",
        )


def _send(group: dist.ProcessGroup, recording: RankRecording) -> None:
    data = torch.frombuffer(bytearray(pickle.dumps(recording)), dtype=torch.uint8)
    group.send([torch.tensor([data.numel()])], 0, 1).wait()
    group.send([data], 0, 2).wait()


def _receive(group: dist.ProcessGroup, peer: int) -> RankRecording:
    size = torch.zeros(1, dtype=torch.int64)
    group.recv([size], peer, 1).wait()
    data = torch.empty(int(size), dtype=torch.uint8)
    group.recv([data], peer, 2).wait()
    return pickle.loads(data.numpy().tobytes())


# ---------------------------------------------------------------------- clocks


def clock_identity() -> str:
    """Equal in two processes only if `now_ns` reads the same clock in both: one kernel and one time namespace."""
    boot = boot_id()
    return f"{boot} {namespace('time')}" if boot else f"process {os.getpid()} of {socket.gethostname()}"


def on_clock_of_first(group: dist.ProcessGroup, ours: RankRecording) -> RankRecording:
    """Our recording by the first rank's clock; that rank calls `answer_time`. See [Note: one clock]."""
    trips, answer = [], torch.zeros(1, dtype=torch.int64)
    for _ in range(ROUND_TRIPS):
        sent_ns = now_ns()
        group.send([answer], 0, 0).wait()
        group.recv([answer], 0, 0).wait()
        received_ns = now_ns()
        trips.append((received_ns - sent_ns, int(answer) - sent_ns))
    took_ns, theirs_ns = min(trips)
    return replace(ours.later(theirs_ns - took_ns // 2), clock_error_ns=(took_ns + 1) // 2)


def answer_time(group: dist.ProcessGroup, peer: int) -> None:
    """Send our time to rank `peer` of `group`, once for each of its questions."""
    message = torch.zeros(1, dtype=torch.int64)
    for _ in range(ROUND_TRIPS):
        group.recv([message], peer, 0).wait()
        message.fill_(now_ns())
        group.send([message], peer, 0).wait()
