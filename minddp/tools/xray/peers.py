"""Gathering the ranks' recordings on the first rank that recorded.

[Note: which ranks record]
Any set of ranks may record, and no rank knows which others do. A collective would hang if one rank did not take
part, so the ranks agree through the store, where no rank waits for another. Each rank posts a message when it
begins to record. When one rank has recorded a synchronised step to its end, all others have begun that step, so
every rank that records it has posted its message. The first rank to stop proposes the list of these ranks, and the
list is settled for all. Only these ranks open a gloo group of their own. Every wait in it has a limit; after the
limit each rank keeps its own recording alone, with a note that says so.
"""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist

from minddp.platform import wording
from minddp.platform.store import Messages
from minddp.tools.xray.clock_offset import ClockOffset, answer_for_offset, ask_for_offset
from minddp.tools.xray.recording import RankRecording
from minddp.tools.xray.sources import Source

# The recordings on this rank, notes for the page, and whether this rank has all recordings.
Gathered = tuple[tuple[RankRecording, ...], tuple[str, ...], bool]


class Peers:
    """The ranks that record, as seen by one of them. See [Note: which ranks record]."""

    def __init__(self, source: Source, limit_s: float):
        self._rank, self._world_size, self._limit_s = source.rank, source.world_size, limit_s
        self._messages: Messages | None = None
        if (store := source.store) is not None:  # a rank may begin several times before the same step
            self._messages = Messages.open(store, source.topic, self._rank, self._world_size)
            self._messages.post(True, "records")

    def gather(self, ours: RankRecording) -> Gathered:
        """All recordings on the first rank, with the offsets of their clocks; only `ours` on the others."""
        members = self._agree()
        if len(members) == 1:
            return (ours,), self._notes([self._rank]), True
        try:
            assert self._messages is not None
            store = dist.PrefixStore(f"{self._messages.topic}/group", self._messages.store)
            limit = datetime.timedelta(seconds=self._limit_s)
            opened = dist.ProcessGroupGloo(store, members.index(self._rank), len(members), limit)
            group = cast("dist.ProcessGroup", opened)
            if members[0] != self._rank:
                offset = ask_for_offset(group, 0)
                _send(group, replace(ours, clock=offset))
                return (ours,), (), False
            others = []
            for peer in range(1, len(members)):
                answer_for_offset(group, peer)
                others.append(_receive(group, peer))
        except RuntimeError as error:
            note = (
                f"{wording.ranks(members).capitalize()} recorded, but could not meet within {self._limit_s:g} "
                f"s, so this is rank {self._rank} alone ({str(error).splitlines()[0]})."
            )
            return (ours,), (note,), True
        exact = ClockOffset(0, 0)
        others = [replace(o, clock=exact) if o.clock_identity == ours.clock_identity else o for o in others]
        return (replace(ours, clock=exact), *others), self._notes(members), True

    def leave(self) -> None:
        """This rank has failed. If it is the first to stop, no other rank will wait for it."""
        self._agree(without_us=True)

    def _agree(self, *, without_us: bool = False) -> list[int]:
        """The ranks that will meet, in order; only this rank if it is not one of them."""
        if self._messages is None:
            return [self._rank]
        present = self._messages.gather("records", limit_s=0.0)
        proposal = [rank for rank in present if not (without_us and rank == self._rank)]
        members: list[int] = self._messages.settle(proposal, "members")
        return members if self._rank in members else [self._rank]

    def _notes(self, members: Sequence[int]) -> tuple[str, ...]:
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
