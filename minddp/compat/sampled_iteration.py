"""The times of one iteration: when forward, backward and communication began and ended.

`SampledIteration.observe` receives the reducer's events, which carry no time, and reads the clock: that of the
host, and for a module on a GPU also the device's, because the host runs ahead. As in torch, a sampled iteration
cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from minddp.core.events import Event, EventKind
from minddp.platform import streams

# Named as in torch's logging data. As in torch, backward "begins" when forward has ended: it includes the loss.
MOMENTS = {
    "forward_compute_time_start": EventKind.FORWARD_BEGIN,
    "backward_compute_time_start": EventKind.FORWARD_END,
    "backward_comm_time_start": EventKind.BUCKET_LAUNCHED,
    "backward_compute_time_end": EventKind.GRADIENTS_COMPLETE,
    "backward_comm_time_end": EventKind.BACKWARD_END,
}
SPANS = {
    "forward_compute_time": (EventKind.FORWARD_BEGIN, EventKind.FORWARD_END),
    "backward_compute_time": (EventKind.FORWARD_END, EventKind.GRADIENTS_COMPLETE),
    "backward_comm_time": (EventKind.BUCKET_LAUNCHED, EventKind.BACKWARD_END),
    "backward_compute_comm_overlap_time": (EventKind.BUCKET_LAUNCHED, EventKind.GRADIENTS_COMPLETE),
}


@dataclass(frozen=True)
class Moment:
    """`host_ns` is a reading of `time.perf_counter_ns`; `on_device` is an event of a device that has streams."""

    host_ns: int
    on_device: Any

    @classmethod
    def now(cls, device: torch.device) -> Moment:
        event = streams.timed_event(device) if streams.has_streams(device) else None
        return cls(time.perf_counter_ns(), event)

    def ns_until(self, later: Moment) -> int:
        """Nanoseconds, measured on the device if it has streams. Waits until the device has reached `later`."""
        if self.on_device is None or later.on_device is None:
            return later.host_ns - self.host_ns
        later.on_device.synchronize()
        return int(self.on_device.elapsed_time(later.on_device) * 1e6)


class SampledIteration:
    """A forward that trains and its backward. Only the first event of each kind counts."""

    def __init__(self, device: torch.device):
        self._device = device
        self._unix_ns = time.time_ns() - time.perf_counter_ns()  # plus a reading: nanoseconds since 1970
        self.moments: dict[EventKind, Moment] = {}
        self.params_ready: list[int] = []  # in the order of their gradients
        self.num_buckets_reduced = 0

    def observe(self, event: Event) -> None:
        kind = event.kind
        # In a recorded backward, parameters are also marked ready after GRADIENTS_COMPLETE, in no order that
        # counts.
        if kind is EventKind.PARAM_READY and EventKind.GRADIENTS_COMPLETE not in self.moments:
            self.params_ready.append(event.subject)
        if kind is EventKind.BUCKET_LAUNCHED:
            self.num_buckets_reduced += 1
        if kind in MOMENTS.values() and kind not in self.moments:
            self.moments[kind] = Moment.now(self._device)

    def unix_ns(self) -> dict[str, int]:
        """The moments in nanoseconds since 1970; 0 for one that has not happened."""
        return {
            name: self._unix_ns + self.moments[kind].host_ns if kind in self.moments else 0
            for name, kind in MOMENTS.items()
        }

    def spans_ns(self) -> dict[str, int]:
        """The spans that have ended. The first backward of a static graph has no overlap."""
        return {
            name: span
            for name, (begin, end) in SPANS.items()
            if begin in self.moments
            and end in self.moments
            and (span := self.moments[begin].ns_until(self.moments[end])) >= 0
        }
