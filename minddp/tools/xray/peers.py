"""Gathering the ranks' recordings on the first rank that recorded, on one clock.

[Note: which ranks record]
Any set of ranks may record, and no rank knows which others do. A collective would hang if one rank did not take
part, so the ranks agree through the store, where no rank waits for another. Each rank posts a message when it
begins to record. When one rank has recorded a synchronised step to its end, all others have begun that step, so
every rank that records it has posted its message. The first rank to stop proposes the list of these ranks, and the
list is settled for all. The others post their recordings, which the first rank reads. Every wait has a limit; after
the limit each rank keeps its own recording alone, with a note that says so.

[Note: one clock]
Processes of one machine read the same clock. On another machine a rank asks the first rank for the time, again and
again: it reads its own clock when a question leaves and when its answer arrives, and the first rank reads its own
in between. The quickest answer counts; half of its time is the largest possible error (Cristian, 1989).
"""

from __future__ import annotations

import datetime
import time
from dataclasses import replace

import torch.distributed as dist

from minddp.platform import wording
from minddp.platform.host import host_identity
from minddp.platform.store import Messages, own_connection
from minddp.tools.xray.recording import RankRecording
from minddp.tools.xray.sources import Source

ROUND_TRIPS = 32  # they take some milliseconds

now_ns = time.perf_counter_ns  # a monotonic clock with an arbitrary zero


class Peers:
    """The ranks that record, as seen by one of them. See [Note: which ranks record]."""

    def __init__(self, source: Source, limit_s: float):
        self._rank, self._world_size, self._limit_s = source.rank, source.world_size, limit_s
        store = dist.HashStore() if source.store is None else source.store  # without a store a rank meets no other
        # `open` numbers the topic: a rank may begin several times before the same step
        self._messages = Messages.open(store, source.topic, self._rank, self._world_size)
        self._messages.post(host_identity("time"), "records")  # equal where `now_ns` reads the same clock

    def gather(self, ours: RankRecording) -> tuple[tuple[RankRecording, ...], tuple[str, ...], bool]:
        """All recordings on the first rank, on its clock, or only `ours`; notes; whether it has all."""
        clocks = self._agree()
        first, *others = members = sorted(clocks)
        received: list[RankRecording] = []
        try:
            if first != self._rank:
                if clocks[first] != clocks[self._rank]:
                    ours = on_clock_of_first(self._messages, ours, self._limit_s)
                self._messages.post(ours, "recording")
                self._await("received", [first])
                return (ours,), (), False
            if others:
                for rank in others:
                    if clocks[rank] != clocks[first]:
                        answer_time(self._messages, rank, self._limit_s)
                self._await("recording", others)
                received = [self._messages.take(rank, "recording") for rank in others]
                self._messages.post(True, "received")
        except RuntimeError as error:
            note = (
                f"{wording.ranks(members).capitalize()} recorded, but could not meet within {self._limit_s:g} "
                f"s, so this is rank {self._rank} alone ({str(error).splitlines()[0]})."
            )
            return (ours,), (note,), True
        return (ours, *received), self._notes(members), True

    def _await(self, key: str, ranks: list[int]) -> None:
        """Wait for the messages of these ranks; RuntimeError if one does not come within the limit."""
        found = self._messages.gather(key, limit_s=self._limit_s, ranks=ranks)
        if missing := [rank for rank in ranks if rank not in found]:
            raise RuntimeError(f"{wording.ranks(missing)} did not come")

    def leave(self) -> None:
        """This rank has failed. If it is the first to stop, no other rank will wait for it."""
        self._agree(without_us=True)

    def _agree(self, *, without_us: bool = False) -> dict[int, str]:
        """The clocks of the ranks that will meet; only this rank's if it is not one of them."""
        present = self._messages.gather("records", limit_s=0.0)
        proposal = {rank: clock for rank, clock in present.items() if not (without_us and rank == self._rank)}
        members: dict[int, str] = self._messages.settle(proposal, "members")
        return members if self._rank in members else {self._rank: ""}

    def _notes(self, members: list[int]) -> tuple[str, ...]:
        silent = [rank for rank in range(self._world_size) if rank not in members]
        if not silent:
            return ()
        return (
            f"{wording.ranks(silent).capitalize()} did not record: when it launched buckets is not known, so "
            f"waiting for that looks like slow communication.",
        )


# ---------------------------------------------------------------------- clocks


def on_clock_of_first(messages: Messages, ours: RankRecording, limit_s: float) -> RankRecording:
    """Our recording by the first rank's clock; that rank calls `answer_time`. See [Note: one clock]."""
    store, trips = _exchange_with(messages, ours.rank, limit_s), []
    for trip in range(ROUND_TRIPS):
        sent_ns = now_ns()
        store.set(f"question {trip}", "")
        answer_ns = int(store.get(f"answer {trip}"))
        trips.append((now_ns() - sent_ns, answer_ns - sent_ns))
    took_ns, theirs_ns = min(trips)
    return replace(ours.later(theirs_ns - took_ns // 2), clock_error_ns=(took_ns + 1) // 2)


def answer_time(messages: Messages, rank: int, limit_s: float) -> None:
    """Tell `rank` our time, once for each of its questions."""
    store = _exchange_with(messages, rank, limit_s)
    for trip in range(ROUND_TRIPS):
        store.get(f"question {trip}")
        store.set(f"answer {trip}", str(now_ns()))


def _exchange_with(messages: Messages, rank: int, limit_s: float) -> dist.Store:
    """Its `get` waits for a value up to the limit, then raises RuntimeError."""
    store = dist.PrefixStore(f"{messages.topic}/clock of {rank}", own_connection(messages.store))
    store.set_timeout(datetime.timedelta(seconds=limit_s))
    return store
