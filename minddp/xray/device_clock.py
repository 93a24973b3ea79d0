"""When things happen on a GPU, which is not when the host asks for them.

Each stamp is a CUDA event recorded on the stream that is current: forward's end, a bucket's launch and, in the
callback of a collective's future, its completion. At the end of the recording all are read as distances from a
first one, whose time on the host's clock is known.

An event per parameter would cost more than all the rest, so a gradient's arrival is only known on the host's
clock; its time on the device is interpolated between the stamps around it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minddp.xray.clocks import now_ns


class DeviceClock:
    """Stamps of one CUDA device, read together when the recording is over."""

    def __init__(self, device: torch.device):
        self.device = device
        torch.cuda.synchronize(device)
        self._first = self.stamp()
        self._first.synchronize()
        self._first_ns = now_ns()

    def stamp(self) -> torch.cuda.Event:
        """A mark at the end of what the current stream has to do."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def read(self, stamps: Sequence[torch.cuda.Event | None]) -> list[int | None]:
        """When the device came to each stamp, in nanoseconds on the host's clock. Waits for the device."""
        torch.cuda.synchronize(self.device)
        return [
            None if stamp is None else self._first_ns + round(self._first.elapsed_time(stamp) * 1e6)
            for stamp in stamps
        ]


def interpolate(host_ns: Sequence[int], device_ns: Sequence[int | None]) -> list[int]:
    """Fill the gaps in `device_ns`, event by event in the order of `host_ns`, linearly between its neighbours."""
    known = [(host, device) for host, device in zip(host_ns, device_ns, strict=True) if device is not None]
    if not known:
        return list(host_ns)
    # Nanoseconds since the machine started do not fit a float's 53 bits; distances do.
    base = known[0][0]
    hosts = np.array([host - base for host, _ in known], dtype=np.float64)
    devices = np.array([device - base for _, device in known], dtype=np.float64)
    filled = np.interp([host - base for host in host_ns], hosts, devices)
    return [
        base + round(float(between)) if device is None else device
        for device, between in zip(device_ns, filled, strict=True)
    ]
