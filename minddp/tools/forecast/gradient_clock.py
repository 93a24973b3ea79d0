"""When gradients are ready, by the clock that computes them: the host's on a CPU, the device's on a GPU.

[Note: stamps]
On a GPU the host only enqueues; the work happens later, on a stream. So a moment there is a CUDA event, recorded
behind what is enqueued on the current stream so far: a gradient's is reached when its last kernel has run, that of
backward's end when the averages are in the gradients, since that stream waits for the communicator's. To record an
event blocks nothing. To read one blocks the host, so stamps are kept as they are while steps are observed, and read
between two steps, when enough has been seen.

[Note: computing]
On a CPU messages may use backward's core, and then a gradient is late for a reason that another plan would not
give. How long backward has computed until then is the same by any plan: the time for which its thread has had a
core. A GPU's kernels are assumed to compute whenever they can.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from minddp.platform import streams


class HostMark(NamedTuple):
    """Seconds since some moment, those for which the thread has had a core, and which thread it is."""

    now_s: float
    on_core_s: float
    thread: int


class HostClock:
    """The host's own clock, and its account of the time that a thread has had a core. See [Note: computing]."""

    is_stopped = False

    def stamp(self) -> HostMark:
        return HostMark(time.perf_counter(), time.thread_time(), threading.get_ident())

    def seconds(self, first: HostMark, last: HostMark) -> float:
        return last.now_s - first.now_s

    def computed_s(self, first: HostMark, last: HostMark) -> float:
        """Two threads have no common account: then all of the time, since autograd went on in the other thread."""
        return last.on_core_s - first.on_core_s if first.thread == last.thread else self.seconds(first, last)


class DeviceClock:
    """Marks are events of one device; `is_stopped` while a CUDA graph captures. See [Note: stamps]."""

    def __init__(self, device: torch.device):
        self._device = device

    @property
    def is_stopped(self) -> bool:
        return streams.is_capturing(self._device)

    def stamp(self) -> Any:
        return streams.timed_event(self._device)

    def seconds(self, first: Any, last: Any) -> float:
        last.synchronize()
        first.synchronize()  # perhaps of another stream, and then not necessarily reached by now
        return first.elapsed_time(last) / 1e3

    computed_s = seconds


Clock = HostClock | DeviceClock


def clock_of(devices: Iterable[torch.device]) -> Clock:
    """The clock by which gradients on `devices` become ready.

    Raises:
        NotImplementedError: they are neither all on the CPU nor all on one device that has streams.
    """
    distinct = sorted(set(devices), key=str)
    if len(distinct) == 1 and streams.has_streams(distinct[0]):
        return DeviceClock(distinct[0])
    if all(device.type == "cpu" for device in distinct):
        return HostClock()
    raise NotImplementedError(
        f'bucket_cap_mb="auto" has a clock for modules on the CPU or on one device that has streams, but the '
        f"parameters are on {', '.join(map(str, distinct))}, whose times cannot be compared. Pass a number."
    )
