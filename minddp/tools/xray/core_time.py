"""The core time that messages take from the thread that trains.

[Note: core time]
On a CPU, messages use the cores on which ranks compute. A launch costs
backward the CPU time that the launch takes on backward's thread. After the launch, threads of the transport compete
for that core. Other ranks compete for it, too, but as much in forward as in backward. So only an excess counts as
the cost of messages: backward's wait for a core minus forward's wait during the same amount of computation.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from minddp.core.events import EventKind

SCHEDULED = Path("/proc/thread-self/schedstat")

_BEGINS = {EventKind.FORWARD_BEGIN, EventKind.BACKWARD_BEGIN}
_LAUNCH = {EventKind.BUCKET_LAUNCHED, EventKind.LAUNCH_END}
KINDS = _BEGINS | _LAUNCH | {EventKind.GRADIENTS_COMPLETE}  # the events at which a core time is read


class CoreTime(NamedTuple):
    """How long a thread has run on a core, and how long it has waited for one, in nanoseconds."""

    had_ns: int = 0
    waited_ns: int = 0

    def since(self, earlier: CoreTime) -> CoreTime:
        return CoreTime(self.had_ns - earlier.had_ns, self.waited_ns - earlier.waited_ns)


class CoreClock:
    """Core times of the thread that creates it. Only Linux counts the waits; elsewhere they are 0."""

    def __init__(self) -> None:
        self._file = SCHEDULED.open("rb", buffering=0) if SCHEDULED.exists() else None

    def read(self) -> CoreTime:
        waited = "0" if self._file is None else os.pread(self._file.fileno(), 100, 0).split()[1]
        return CoreTime(time.thread_time_ns(), int(waited))  # the run time in the file is updated late


def costs_ns(events: Iterable[tuple[EventKind, CoreTime]]) -> tuple[float, float]:
    """Medians: the cost of a launch, and backward's wait for cores that messages use. See [Note: core time]."""
    last: dict[EventKind, CoreTime] = {}
    launches_ns: list[int] = []
    crowded_ns: list[float] = []
    for kind, now in events:
        last[kind] = now
        if kind is EventKind.LAUNCH_END and EventKind.BUCKET_LAUNCHED in last:
            launches_ns.append(now.since(last[EventKind.BUCKET_LAUNCHED]).had_ns)
        elif kind is EventKind.GRADIENTS_COMPLETE and last.keys() >= _BEGINS:
            begin = last[EventKind.BACKWARD_BEGIN]
            forward, backward = begin.since(last[EventKind.FORWARD_BEGIN]), now.since(begin)
            usual_ns = backward.had_ns * forward.waited_ns / max(1, forward.had_ns)
            crowded_ns.append(max(0.0, backward.waited_ns - usual_ns))
    return statistics.median(launches_ns or [0]), statistics.median(crowded_ns or [0])
