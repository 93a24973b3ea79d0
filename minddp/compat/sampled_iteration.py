"""One iteration, observed: when its forward and backward began and ended, and what was communicated meanwhile.

`observe` is a sink of the reducer's events. Events carry no time, so it takes the time itself: on the host, and for
a module on a GPU there as well, since the host does not wait for its work. As in torch, an iteration that is
sampled cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from minddp.core.events import Event, EventKind
from minddp.platform import streams

# The names of moments and spans in torch's logging data. Backward "begins" when forward has ended, as torch has it:
# what lies between, such as the loss, is counted with it.
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
        """Nanoseconds of computing time. Waits for the device to have come as far as `later`."""
        if self.on_device is None or later.on_device is None:
            return later.host_ns - self.host_ns
        later.on_device.synchronize()
        return int(self.on_device.elapsed_time(later.on_device) * 1e6)


class SampledIteration:
    """What a forward that trains, and its backward, looked like. Only the first event of a kind counts."""

    def __init__(self, device: torch.device):
        self._device = device
        self._unix_ns = time.time_ns() - time.perf_counter_ns()  # added to a reading gives the time of day
        self.moments: dict[EventKind, Moment] = {}
        self.params_ready: list[int] = []  # in the order in which their gradients arrived
        self.num_buckets_reduced = 0

    def observe(self, event: Event) -> None:
        kind = event.kind
        # After GRADIENTS_COMPLETE a parameter only counts as ready: a recorded backward.
        if kind is EventKind.PARAM_READY and EventKind.GRADIENTS_COMPLETE not in self.moments:
            self.params_ready.append(event.subject)
        if kind is EventKind.BUCKET_LAUNCHED:
            self.num_buckets_reduced += 1
        if kind in MOMENTS.values() and kind not in self.moments:
            self.moments[kind] = Moment.now(self._device)

    def unix_ns(self) -> dict[str, int]:
        """The moments, in nanoseconds since 1970; 0 where something has not happened."""
        return {
            name: self._unix_ns + self.moments[kind].host_ns if kind in self.moments else 0
            for name, kind in MOMENTS.items()
        }

    def spans_ns(self) -> dict[str, int]:
        """The spans between two moments in this order: the first backward of a static graph overlaps nothing."""
        return {
            name: span
            for name, (begin, end) in SPANS.items()
            if begin in self.moments
            and end in self.moments
            and (span := self.moments[begin].ns_until(self.moments[end])) >= 0
        }
