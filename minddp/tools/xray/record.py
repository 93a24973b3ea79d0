"""Recording on one rank: the event sink, the ring that it fills, and reading the ring afterwards.

**Cost.** A backward calls the sink hundreds of times. The sink reads the clock and appends the event to a bounded
deque, both in C; the oldest events fall out at the other end. Sorting and naming wait until the recording is over.

**Times on a GPU.** The host only enqueues work for a GPU. So each event also has a stamp, a CUDA event recorded on
the current stream. When the recording ends, all stamps are read as distances from a first stamp, whose time on the
host's clock is known. A gradient has no stamp, since stamps for all gradients would cost more than everything
else: its time is interpolated between the stamps around it.
"""

from __future__ import annotations

import itertools
import platform
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from minddp.core.events import Event, EventKind, EventSink
from minddp.core.plan import BucketPlan
from minddp.platform import streams
from minddp.tools.forecast.gradient_clock import DeviceClock
from minddp.tools.xray.clock_offset import clock_identity, now_ns
from minddp.tools.xray.host import CoreWatch, HostWatch
from minddp.tools.xray.recording import Layout, RankRecording, Stamped
from minddp.tools.xray.sources import Source

COMPLETIONS_S = 0.05  # how long to wait for the completions of launched collectives
CAPACITY = 2**17  # events; about 12 MB when full, 200 steps of a model of 500 parameters


class Recorder:
    """Records the events of one rank's sources, and its optimizers' steps, from now on until `stop`."""

    def __init__(self, *sources: Source, capacity: int = CAPACITY, first_step: int | None = None):
        if capacity < 1:
            raise ValueError(f"The ring must hold at least 1 event, but capacity is {capacity}.")
        # The ring: serial number, time, event, stamp and module
        self._ring: deque[tuple[int, int, Event, Any, int]] = deque(maxlen=capacity)
        self._serial = itertools.count().__next__
        self._capacity = capacity
        # The clock of the device, and its time in the host's
        self._device = sources[0].device
        self._device_clock = DeviceClock(self._device) if streams.has_streams(self._device) else None
        if self._device_clock is not None:
            self._first_stamp = self._device_clock.stamp()
            self._device_clock.seconds(self._first_stamp, self._first_stamp)  # waits for the device to reach it
            self._first_ns = now_ns()
        # The senders of events
        self._sources: list[tuple[Source, EventSink, BucketPlan]] = []  # each with its first plan
        self._first_step = sources[0].steps_taken if first_step is None else first_step
        self._host, self._core = HostWatch(self._emit), CoreWatch()
        self._host.start()
        self._optimizer_hooks = [
            register_optimizer_step_pre_hook(partial(self._emit, EventKind.OPTIMIZER_BEGIN)),
            register_optimizer_step_post_hook(partial(self._emit, EventKind.OPTIMIZER_END)),
        ]
        for source in sources:
            self.add(source)

    def add(self, source: Source) -> None:
        """Record another source of the same rank."""
        sink = self._new_sink(len(self._sources))
        self._sources.append((source, sink, source.plan()))
        source.watch(sink)

    def stop(self, error: BaseException | None = None, modules: Sequence[str] = ()) -> RankRecording:
        """End the recording, with the `error` that ended it, if any. Several `modules` have names."""
        if error is not None:
            self._emit(EventKind.ERROR)
        else:
            self._await_completions()
        stopped_ns = now_ns()
        for source, sink, _ in self._sources:
            source.unwatch(sink)
        for hook in self._optimizer_hooks:
            hook.remove()
        host_waits = self._host.stop()
        launch_ns, crowded_ns = self._core.medians_ns()
        events, dropped = self._read_ring()
        layouts = tuple(layout for module in range(len(self._sources)) for layout in self._layouts(events, module))
        source, *_ = self._sources[0]
        return RankRecording(
            rank=source.rank,
            world_size=source.world_size,
            host=platform.node(),
            device=_device_name(self._device),
            backend=source.backend,
            events=events,
            layouts=layouts,
            stopped_ns=max([stopped_ns, *(event.t_ns for event in events[-1:])]),
            clock_identity=clock_identity(),
            first_step=self._first_step,
            capacity=self._capacity,
            dropped=dropped,
            error=None if error is None else f"{type(error).__name__}: {error}",
            adds_after_ns=round(1e9 * source.adds_after_s),
            modules=tuple(modules),
            peak_bytes=streams.peak_memory_bytes(self._device),
            host_waits=host_waits,
            launch_ns=launch_ns,
            crowded_ns=crowded_ns,
        )

    def _await_completions(self) -> None:
        """Another thread reports a completion, possibly a moment after the wait for the collective has ended."""
        end_s = time.monotonic() + COMPLETIONS_S
        while self._count(EventKind.BUCKET_COMPLETED) < self._count(EventKind.BUCKET_LAUNCHED):
            if time.monotonic() > end_s:  # not every transport reports completions
                return
            time.sleep(0.001)

    def _count(self, kind: EventKind) -> int:
        return sum(event.kind is kind for _, _, event, *_ in list(self._ring))

    def _emit(self, kind: EventKind, *_: Any) -> None:
        self._sources[0][1](Event(kind))

    def _new_sink(self, module: int) -> EventSink:
        append, serial, clock = self._ring.append, self._serial, now_ns
        if self._device_clock is None:
            kinds, see = self._core.KINDS, self._core.see
            return lambda event: append(
                (serial(), clock(), event, see(event.kind) if event.kind in kinds else None, module)
            )
        stamp, gradients = self._device_clock.stamp, (EventKind.PARAM_READY, EventKind.GRADIENT_KEPT)
        return lambda event: append(
            (serial(), clock(), event, None if event.kind in gradients else stamp(), module)
        )

    def _read_ring(self) -> tuple[tuple[Stamped, ...], int]:
        """The events in order of time, and the number of older ones that have fallen out."""
        rows = list(self._ring)
        dropped = rows[0][0] if rows else 0  # the serial number of the oldest event that is left
        times = [t_ns for _, t_ns, *_ in rows]
        if (clock := self._device_clock) is not None:
            seconds = [None if row[3] is None else clock.seconds(self._first_stamp, row[3]) for row in rows]
            times = interpolate(times, [None if s is None else self._first_ns + round(s * 1e9) for s in seconds])
        events = [
            Stamped(t_ns, event.kind, event.subject, module)
            for t_ns, (_, _, event, _, module) in zip(times, rows, strict=True)
        ]
        return tuple(sorted(events, key=lambda event: event.t_ns)), dropped

    def _layouts(self, events: Sequence[Stamped], module: int) -> tuple[Layout, ...]:
        """The plans before and after the last rebuild; as a rule there is one rebuild in a training."""
        source, _, first = self._sources[module]
        rebuilds = [e.t_ns for e in events if e.kind is EventKind.BUCKETS_REBUILT and e.module == module]
        last = Layout(source.plan(), rebuilds[-1] if rebuilds else 0, module)
        return (Layout(first, module=module), last) if rebuilds else (last,)


def interpolate(host_ns: Sequence[int], device_ns: Sequence[int | None]) -> list[int]:
    """Fill the gaps in `device_ns`, event by event in the order of `host_ns`, linearly between its neighbours."""
    known = [(host, device) for host, device in zip(host_ns, device_ns, strict=True) if device is not None]
    if not known:
        return list(host_ns)
    base = known[0][0]  # nanoseconds since the machine started do not fit a float's 53 bits, distances do
    hosts, devices = np.array([(host - base, device - base) for host, device in known], dtype=np.float64).T
    filled = np.interp([host - base for host in host_ns], hosts, devices)
    return [
        base + round(float(between)) if device is None else device
        for device, between in zip(device_ns, filled, strict=True)
    ]


def _device_name(device: torch.device) -> str:
    return streams.properties(device).name if streams.has_streams(device) else device.type
