"""The offset between the clocks of two processes, from messages that both have seen.

We read our clock when a question leaves and when its answer arrives; they read theirs once, in between (Cristian,
1989). Each such round trip bounds the offset from both sides, and all together leave the intersection of these
bounds. Its middle is the estimate, half its width the error.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from minddp.platform.host import boot_id, namespace

ROUND_TRIPS = 32  # they take some milliseconds

now_ns = time.perf_counter_ns  # a monotonic clock with an arbitrary zero


class RoundTrip(NamedTuple):
    """A question of ours and its answer. `theirs_ns` is read from their clock, the others from ours."""

    sent_ns: int
    theirs_ns: int
    received_ns: int


@dataclass(frozen=True)
class ClockOffset:
    """Their clock minus our clock, and the largest possible error of the offset."""

    offset_ns: int
    error_ns: int | None  # None: not measured


def clock_offset(round_trips: Sequence[RoundTrip]) -> ClockOffset:
    low = max(trip.theirs_ns - trip.received_ns for trip in round_trips)
    high = min(trip.theirs_ns - trip.sent_ns for trip in round_trips)
    return ClockOffset((low + high) // 2, (abs(high - low) + 1) // 2)


def ask_for_offset(group: dist.ProcessGroup, peer: int) -> ClockOffset:
    """Our offset to rank `peer` of `group`, which must call `answer_for_offset` meanwhile."""
    round_trips, answer = [], torch.zeros(1, dtype=torch.int64)
    for _ in range(ROUND_TRIPS):
        sent_ns = now_ns()
        group.send([answer], peer, 0).wait()
        group.recv([answer], peer, 0).wait()
        received_ns = now_ns()
        round_trips.append(RoundTrip(sent_ns, int(answer), received_ns))
    return clock_offset(round_trips)


def answer_for_offset(group: dist.ProcessGroup, peer: int) -> None:
    """Send our time to rank `peer` of `group`, once for each of its questions."""
    message = torch.zeros(1, dtype=torch.int64)
    for _ in range(ROUND_TRIPS):
        group.recv([message], peer, 0).wait()
        message.fill_(now_ns())
        group.send([message], peer, 0).wait()


def clock_identity() -> str:
    """Equal in two processes only if `now_ns` reads the same clock in both: one kernel and one time namespace."""
    boot = boot_id()
    return f"{boot} {namespace('time')}" if boot else f"process {os.getpid()} of {socket.gethostname()}"
