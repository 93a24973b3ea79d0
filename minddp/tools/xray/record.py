"""Recording on one rank: the event sink, the ring that it fills, and reading the ring afterwards.

**Cost.** A backward calls the sink hundreds of times. The sink reads the clock and appends the event to a bounded
deque, both in C; the oldest events fall out at the other end. Sorting and naming wait until the recording is over.

**Times on a GPU.** The host only enqueues work for a GPU. So each event also has a stamp, a CUDA event recorded on
the current stream. When the recording ends, all stamps are read as distances from a first stamp, whose time on the
host's clock is known. A gradient has no stamp, since stamps for all gradients would cost more than everything
else: its time is interpolated between the stamps around it.
"""

from __future__ import annotations

import platform
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from minddp.core.events import Event, EventKind, EventSink
from minddp.core.optimizer_steps import StepWatcher
from minddp.platform import streams
from minddp.tools.forecast.gradient_clock import DeviceClock
from minddp.tools.xray.peers import now_ns
from minddp.tools.xray.recording import RankRecording, Stamped
from minddp.tools.xray.sources import Source

COMPLETIONS_S = 0.05  # how long to wait for the completions of launched collectives
# Events: 200 steps of a model of 500 parameters; 12 MB, and 3 MB in a store, which takes values up to 8 MiB.
CAPACITY = 2**17

Row = tuple[int, Event, Any]  # time, event, and on a device its stamp


class Recorder(StepWatcher):
    """Records the events of one rank's source, and its optimizers' steps, from now on until `stop`."""

    def __init__(self, source: Source):
        self._ring: deque[Row] = deque(maxlen=CAPACITY)
        # The clock of the device, and its time in the host's
        self._device = source.device
        self._device_clock = DeviceClock(self._device) if streams.has_streams(self._device) else None
        if self._device_clock is not None:
            self._first_stamp = self._device_clock.stamp()
            self._device_clock.seconds(self._first_stamp, self._first_stamp)  # waits for the device to reach it
            self._first_ns = now_ns()
        # The senders of events
        self._source = source
        self._first_step = source.steps_taken
        self._sink = self._new_sink()
        self.watch_steps()
        source.events.watch(self._sink)

    def stop(self) -> RankRecording:
        """End the recording."""
        self._await_completions()
        stopped_ns = now_ns()
        self.discard()
        source, device = self._source, self._device
        rows = list(self._ring)  # a late completion may still be appended to the ring
        events = self._in_order(rows)
        return RankRecording(
            rank=source.rank,
            world_size=source.world_size,
            host=platform.node(),
            device=streams.properties(device).name if streams.has_streams(device) else device.type,
            backend=source.backend,
            events=events,
            plan=source.plan(),
            stopped_ns=max([stopped_ns, *(event.t_ns for event in events[-1:])]),
            first_step=self._first_step,
            is_full=len(events) == CAPACITY,
            adds_after_ns=round(1e9 * source.adds_after_s),
        )

    def discard(self) -> None:
        """Record no more."""
        self._source.events.unwatch(self._sink)
        self.ignore_steps()

    def _await_completions(self) -> None:
        """Another thread reports a completion, possibly a moment after the wait for the collective has ended."""
        end_s = time.monotonic() + COMPLETIONS_S
        while time.monotonic() < end_s:  # not every transport reports completions
            kinds = Counter(event.kind for _, event, _ in list(self._ring))
            if kinds[EventKind.BUCKET_COMPLETED] >= kinds[EventKind.BUCKET_LAUNCHED]:
                return
            time.sleep(0.001)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._sink(Event(EventKind.OPTIMIZER_BEGIN))

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._sink(Event(EventKind.OPTIMIZER_END))

    def _new_sink(self) -> EventSink:
        append, clock = self._ring.append, now_ns
        if self._device_clock is None:
            return lambda event: append((clock(), event, None))
        stamp, gradients = self._device_clock.stamp, (EventKind.PARAM_READY, EventKind.GRADIENT_KEPT)
        return lambda event: append((clock(), event, None if event.kind in gradients else stamp()))

    def _in_order(self, rows: Sequence[Row]) -> tuple[Stamped, ...]:
        """The events in order of time."""
        times = [t_ns for t_ns, _, _ in rows]
        if (clock := self._device_clock) is not None:
            stamps = {
                t_ns: self._first_ns + round(1e9 * clock.seconds(self._first_stamp, stamp))
                for t_ns, _, stamp in rows
                if stamp is not None
            }
            times = interpolated(times, stamps)
        events = [Stamped(t_ns, *event) for t_ns, (_, event, _) in zip(times, rows, strict=True)]
        return tuple(sorted(events, key=lambda event: event.t_ns))


def interpolated(host_ns: Sequence[int], device_ns: Mapping[int, int]) -> list[int]:
    """The device's times for the host's, linearly between those that `device_ns` has by the host's."""
    if not device_ns:
        return list(host_ns)
    base = host_ns[0]  # nanoseconds since the machine started do not fit a float's 53 bits, distances do
    known = sorted(device_ns.items())
    hosts, devices = ([float(pair[side] - base) for pair in known] for side in (0, 1))
    return [base + round(t) for t in np.interp([float(t - base) for t in host_ns], hosts, devices).tolist()]
