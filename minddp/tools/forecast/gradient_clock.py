"""The clock by which gradients become ready: the host's on a CPU, the device's on a GPU.

On a GPU the host only enqueues work, and a stream runs it later. So a stamp is a CUDA event, recorded behind the
work that is enqueued on the current stream so far. A gradient's event is reached when its last kernel has run, the
event of backward's end when the averages are in the gradients. Recording an event blocks nothing, reading one
blocks the host, so stamps are read between two steps, when enough steps have been observed.

On a CPU messages may use backward's core and delay a gradient, which would not happen by another plan. The time
for which the thread has had a core until then is the same by any plan: it is the time that backward has computed.
A GPU's kernels are assumed to compute whenever they can.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from minddp.platform import streams


class HostMark(NamedTuple):
    """The time in seconds, the time for which the thread has had a core, and the thread."""

    now_s: float
    on_core_s: float
    thread: int


class HostClock:
    """The host's own clock, and its account of the time for which a thread has had a core."""

    is_stopped = False

    def stamp(self) -> HostMark:
        return HostMark(time.perf_counter(), time.thread_time(), threading.get_ident())

    def seconds(self, first: HostMark, last: HostMark) -> float:
        return last.now_s - first.now_s

    def computed_s(self, first: HostMark, last: HostMark) -> float:
        """The time on a core; all of the time if autograd has moved to another thread with its own account."""
        return last.on_core_s - first.on_core_s if first.thread == last.thread else self.seconds(first, last)


class DeviceClock:
    """Stamps are events of one device; `is_stopped` while a CUDA graph captures."""

    def __init__(self, device: torch.device):
        self._device = device

    @property
    def is_stopped(self) -> bool:
        return streams.is_capturing(self._device)

    def stamp(self) -> Any:
        return streams.timed_event(self._device)

    def seconds(self, first: Any, last: Any) -> float:
        last.synchronize()
        first.synchronize()  # it may be of another stream, and then is not necessarily reached by now
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
