"""Ranks on several machines have several clocks: how far is each one from the first rank's?

[Note: clocks]
A rank asks the first one for its time: it notes when it sent the question and when the answer came, and takes it
that the answer was written half-way. If the two ways took unequally long, that is wrong by at most half of the
round trip. So the quickest of many round trips gives both the best estimate and its error bound (Cristian 1989).
Ranks of one machine read one clock, and need no estimate.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from minddp.xray.recording import ClockOffset

ROUNDS = 32  # takes some milliseconds

# The clock of all recordings: it never goes back, and its zero means nothing.
now_ns = time.perf_counter_ns


class RoundTrip(NamedTuple):
    """A question, by our clock, and the answer that it brought, by the first rank's."""

    sent_ns: int
    their_ns: int
    received_ns: int


def offset_from(trips: Sequence[RoundTrip]) -> ClockOffset:
    """What the quickest round trip says. See [Note: clocks]."""
    quickest = min(trips, key=lambda trip: trip.received_ns - trip.sent_ns)
    half_ns = (quickest.received_ns - quickest.sent_ns + 1) // 2
    return ClockOffset(quickest.their_ns - quickest.sent_ns - half_ns, half_ns)


def ask(group: dist.ProcessGroup, peer: int) -> ClockOffset:
    """Our offset to rank `peer` of `group`, which meanwhile must `answer`."""
    trips, answer = [], torch.zeros(1, dtype=torch.int64)
    for _ in range(ROUNDS):
        sent_ns = now_ns()
        group.send([answer], peer, 0).wait()
        group.recv([answer], peer, 0).wait()
        trips.append(RoundTrip(sent_ns, int(answer), now_ns()))
    return offset_from(trips)


def answer(group: dist.ProcessGroup, peer: int) -> None:
    """Tell rank `peer` of `group` the time as often as it asks."""
    message = torch.zeros(1, dtype=torch.int64)
    for _ in range(ROUNDS):
        group.recv([message], peer, 0).wait()
        message.fill_(now_ns())
        group.send([message], peer, 0).wait()


def clock_identity() -> str:
    """Equal in processes that read one and the same clock: those of one kernel and time namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot_id:
            return f"{boot_id.read().strip()} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # not Linux: equal to nobody's
        return f"process {os.getpid()} of {os.uname().nodename}"
