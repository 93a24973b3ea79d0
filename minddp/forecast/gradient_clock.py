"""When things happen, by the clock of whoever does them: the host on a CPU, the device on a GPU.

[Note: stamps]
On a GPU the host only asks; what it asks for happens later, on a stream. So a moment there is a CUDA event,
recorded behind what the current stream has been asked for so far: a gradient's is passed when its last kernel has
run, that of backward's end when the averages are in the gradients, since that stream waits for the communicator's.
To record one makes nobody wait. To read one does, so stamps are kept as they are while steps are observed, and read
between two steps, when enough has been seen.

[Note: computing]
On a CPU backward may be kept waiting while messages use its core, and then a gradient is late for a reason that
another plan would not give. How long backward has computed until then is the same by any plan: it is how long its
thread has had a core. A GPU's kernels are taken to compute whenever they can.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch


class Clock(Protocol):
    """Takes stamps, and tells how far two of them are apart."""

    @property
    def is_stopped(self) -> bool:
        """Whether what is asked for now is not done now: a CUDA graph captures it."""
        ...

    def stamp(self) -> Any:
        """A mark at this moment: at the end of what has been asked for so far. Returns at once."""
        ...

    def seconds(self, first: Any, last: Any) -> float:
        """From one mark to a later one. Waits for the later one to be reached."""
        ...

    def computed_s(self, first: Any, last: Any) -> float:
        """How much of that whoever made the marks has computed. See [Note: computing]."""
        ...


class HostMark(NamedTuple):
    """Seconds since some moment, those for which the thread has had a core, and which thread it is."""

    now_s: float
    on_core_s: float
    thread: int


class HostClock:
    """The host's own, and its account of who has used the cores."""

    is_stopped = False

    def stamp(self) -> HostMark:
        return HostMark(time.perf_counter(), time.thread_time(), threading.get_ident())

    def seconds(self, first: HostMark, last: HostMark) -> float:
        return last.now_s - first.now_s

    def computed_s(self, first: HostMark, last: HostMark) -> float:
        """Two threads have no common account: then all of the time, as autograd has gone on in the other one."""
        return last.on_core_s - first.on_core_s if first.thread == last.thread else self.seconds(first, last)


class DeviceClock:
    """Marks are events of one CUDA device. See [Note: stamps]."""

    def __init__(self, device: torch.device):
        self._device = device

    @property
    def is_stopped(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        first.synchronize()  # of another stream, perhaps, and then not necessarily passed by now
        return first.elapsed_time(last) / 1e3

    def computed_s(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return self.seconds(first, last)


def clock_of(devices: Iterable[torch.device]) -> Clock:
    """The clock of whoever computes gradients on `devices`.

    Raises:
        NotImplementedError: they are neither all on the CPU nor all on one CUDA device.
    """
    distinct = sorted(set(devices), key=str)
    if all(device.type == "cpu" for device in distinct):
        return HostClock()
    if len(distinct) == 1 and distinct[0].type == "cuda":
        return DeviceClock(distinct[0])
    raise NotImplementedError(
        f'bucket_cap_mb="auto" has a clock for modules on the CPU or on one CUDA device, but the parameters are on '
        f"{', '.join(map(str, distinct))}, whose times cannot be compared. Pass a number."
    )
