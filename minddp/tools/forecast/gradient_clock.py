"""The clock that times gradients: the host's on a CPU, the device's on a GPU.

On a GPU a stamp is a CUDA event. Recording one does not block, but reading one blocks the host until it has passed.
So stamps are read between two steps, once enough steps have been observed.

On a CPU, messages compete with backward for a core, so the wall time of a gradient depends on the plan. The CPU
time of the thread does not: it is the time for which backward has computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from minddp.platform import streams


class HostMark(NamedTuple):
    """The wall time and the CPU time of the thread, in seconds."""

    now_s: float
    on_core_s: float


class HostClock:
    """The wall time of the host, and the CPU time of the calling thread."""

    def stamp(self) -> HostMark:
        return HostMark(time.perf_counter(), time.thread_time())

    def seconds(self, first: HostMark, last: HostMark) -> float:
        return last.now_s - first.now_s

    def computed_s(self, first: HostMark, last: HostMark) -> float:
        """The CPU time between two marks, within the wall time: marks of two threads do not fit together."""
        return min(max(0.0, last.on_core_s - first.on_core_s), self.seconds(first, last))


class DeviceClock:
    """Stamps are events of one device, which computes whenever it can."""

    def __init__(self, device: torch.device):
        self._device = device

    def stamp(self) -> Any:
        return streams.timed_event(self._device)

    def seconds(self, first: Any, last: Any) -> float:
        last.synchronize()
        first.synchronize()  # it may be on another stream, where it need not have completed yet
        return first.elapsed_time(last) / 1e3

    computed_s = seconds


Clock = HostClock | DeviceClock


def clock_of(devices: Iterable[torch.device]) -> Clock:
    """The clock that times gradients on `devices`.

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
