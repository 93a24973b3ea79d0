"""When things happen, by the clock of whoever does them: the host on a CPU, the device on a GPU.

[Note: stamps]
On a GPU the host only asks; what it asks for happens later, on a stream. So a moment there is a CUDA event,
recorded behind what the current stream has been asked for so far: a gradient's is passed when its last kernel has
run, that of backward's end when the averages are in the gradients, since that stream waits for the communicator's.
To record one makes nobody wait. To read one does, so stamps are kept as they are while steps are observed, and read
between two steps, when enough has been seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

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


class HostClock:
    """Marks are numbers: seconds since some moment."""

    is_stopped = False

    def stamp(self) -> float:
        return time.perf_counter()

    def seconds(self, first: float, last: float) -> float:
        return last - first


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
