"""How far one clock is ahead of another, from events that both have seen.

[Note: clock offsets]
Two processes read their own clocks before and after one event. The event lies between the two readings of each, so
our clock's time of it is at least `before` of ours and theirs at most `after` of theirs, and the other way round.
Each event bounds the offset from both sides, and all events together leave the intersection of these bounds: its
middle is the estimate, half its width the error. An event may be

- a question and its answer: ours is read when the question leaves and when the answer arrives, theirs in between,
  once (Cristian, 1989);
- a barrier that both enter and leave.

Processes that read one clock need no estimate: see `clock_identity`.
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

now_ns = time.perf_counter_ns  # a monotonic clock, the zero of which has no meaning


class Reading(NamedTuple):
    """One clock, read before and after an event; the same number twice where it is read at the event itself."""

    before_ns: int
    after_ns: int


@dataclass(frozen=True)
class ClockOffset:
    """What to add to times of our clock to get times of theirs, and the largest possible error of that.

    `error_ns` is `None` where the offset was not measured.
    """

    offset_ns: int
    error_ns: int | None


def clock_offset(ours: Sequence[Reading], theirs: Sequence[Reading]) -> ClockOffset:
    """The offset that the readings of the same events by both clocks allow. See [Note: clock offsets]."""
    pairs = list(zip(ours, theirs, strict=True))
    low = max(their.before_ns - our.after_ns for our, their in pairs)
    high = min(their.after_ns - our.before_ns for our, their in pairs)
    return ClockOffset((low + high) // 2, (abs(high - low) + 1) // 2)


def ask_for_offset(group: dist.ProcessGroup, peer: int) -> ClockOffset:
    """Our offset to rank `peer` of `group`, which must call `answer_for_offset` meanwhile."""
    ours, theirs, answer = [], [], torch.zeros(1, dtype=torch.int64)
    for _ in range(ROUND_TRIPS):
        sent_ns = now_ns()
        group.send([answer], peer, 0).wait()
        group.recv([answer], peer, 0).wait()
        ours.append(Reading(sent_ns, now_ns()))
        theirs.append(Reading(int(answer), int(answer)))
    return clock_offset(ours, theirs)


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
