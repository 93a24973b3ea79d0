"""Waits of the training thread outside the wrapper: for batches of a `DataLoader`, for a device, and for a core.

While a recording runs, methods of torch's classes are replaced. Those that fetch a batch emit events. Those that
copy a tensor's value from a device to the host add up their waiting time for each calling line of the script.

[Note: core time]
On a CPU, messages use the cores on which ranks compute. A launch costs
backward the CPU time that the launch takes on backward's thread. After the launch, threads of the transport compete
for that core. Other ranks compete for it, too, but as much in forward as in backward. So only an excess counts as
the cost of messages: backward's wait for a core minus forward's wait during the same amount of computation.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from minddp.core.events import EventKind
from minddp.platform import streams
from minddp.tools.xray.clock_offset import now_ns

SCHEDULED = Path("/proc/thread-self/schedstat")
FETCHING = ((DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__"))
WAITING = ("item", "tolist", "cpu", "numpy", "to", "__bool__", "__int__", "__float__")


class HostWait(NamedTuple):
    """The total wait of the host at one line of the script, such as ".item() at train.py:31"."""

    where: str
    times: int
    ns: int


class HostWatch:
    """Watches the thread that creates it, from `start` to `stop`. Several may run at once and end in any order."""

    _running: ClassVar[list[HostWatch]] = []
    _patches: ClassVar[ExitStack] = ExitStack()  # active while a watch is running

    def __init__(self, emit: Callable[[EventKind], None]):
        self.emit, self._thread = emit, threading.get_ident()
        self._waits: dict[str, HostWait] = {}

    def start(self) -> None:
        if not self._running:
            fetching = [(owner, name, _fetching) for owner, name in FETCHING]
            for owner, name, wrap in [*fetching, *((torch.Tensor, name, _waiting) for name in WAITING)]:
                self._patches.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))
        self._running.append(self)

    def stop(self) -> tuple[HostWait, ...]:
        """The waits for a device, the longest first."""
        self._running.remove(self)
        if not self._running:
            self._patches.close()
        return tuple(sorted(self._waits.values(), key=lambda wait: -wait.ns))

    @classmethod
    def here(cls) -> list[HostWatch]:
        """The watches of the calling thread."""
        return [watch for watch in cls._running if watch._thread == threading.get_ident()]

    def add(self, where: str, ns: int) -> None:
        _, times, before_ns = self._waits.get(where, HostWait(where, 0, 0))
        self._waits[where] = HostWait(where, times + 1, before_ns + ns)


def _fetching(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def fetching(loader: Any) -> Any:
        watches = HostWatch.here()
        for watch in watches:
            watch.emit(EventKind.DATA_BEGIN)
        try:
            return method(loader)
        finally:
            for watch in watches:
                watch.emit(EventKind.DATA_END)

    return fetching


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def waiting(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if not streams.has_streams(tensor.device) or not (watches := HostWatch.here()):
            return method(tensor, *args, **options)
        begin_ns = now_ns()
        try:
            return method(tensor, *args, **options)
        finally:
            took_ns, caller = now_ns() - begin_ns, sys._getframe(1)
            place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
            for watch in watches:
                watch.add(f".{method.__name__}() at {place}", took_ns)

    return waiting


class CoreTime(NamedTuple):
    """How long a thread has run on a core, and how long it has waited for one, in nanoseconds."""

    had_ns: int = 0
    waited_ns: int = 0

    def since(self, earlier: CoreTime) -> CoreTime:
        return CoreTime(self.had_ns - earlier.had_ns, self.waited_ns - earlier.waited_ns)


class CoreClock:
    """Core times of the thread that creates it. Only Linux counts the waits; elsewhere they are 0."""

    def __init__(self) -> None:
        self._file = SCHEDULED.open("rb", buffering=0) if SCHEDULED.exists() else None

    def read(self) -> CoreTime:
        waited = "0" if self._file is None else os.pread(self._file.fileno(), 100, 0).split()[1]
        return CoreTime(time.thread_time_ns(), int(waited))  # the run time in the file is updated late


class CoreWatch:
    """Measures the core time that messages take from the thread that creates it. See [Note: core time]."""

    KINDS: ClassVar[set[EventKind]] = {
        EventKind.FORWARD_BEGIN,
        EventKind.BACKWARD_BEGIN,
        EventKind.BUCKET_LAUNCHED,
        EventKind.LAUNCH_END,
        EventKind.GRADIENTS_COMPLETE,
    }

    def __init__(self) -> None:
        self._read = CoreClock().read
        self._last: dict[EventKind, CoreTime] = {}
        self._launches_ns: list[int] = []
        self._crowded_ns: list[float] = []

    def see(self, kind: EventKind) -> None:
        """Take note of an event of one of `KINDS`."""
        now = self._last[kind] = self._read()
        if kind is EventKind.LAUNCH_END:
            self._launches_ns.append(now.since(self._last.get(EventKind.BUCKET_LAUNCHED, now)).had_ns)
        elif kind is EventKind.GRADIENTS_COMPLETE and {EventKind.FORWARD_BEGIN, EventKind.BACKWARD_BEGIN} <= set(
            self._last
        ):
            begin = self._last[EventKind.BACKWARD_BEGIN]
            forward, backward = begin.since(self._last[EventKind.FORWARD_BEGIN]), now.since(begin)
            usual_ns = backward.had_ns * forward.waited_ns / max(1, forward.had_ns)
            self._crowded_ns.append(max(0.0, backward.waited_ns - usual_ns))

    def medians_ns(self) -> tuple[float, float]:
        """Medians: the cost of a launch, and backward's wait for cores that messages use."""
        return statistics.median(self._launches_ns or [0]), statistics.median(self._crowded_ns or [0])
