"""What the thread that trains waits for outside the wrapper: batches of a `DataLoader`, and a device.

Methods of torch's classes are replaced while a recording runs: those that fetch a batch emit events, and those of a
tensor that give the host a value of a device add up for how long, by the line of the script that calls them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from minddp.core.events import EventKind
from minddp.platform import streams
from minddp.platform.clock_offset import now_ns

FETCHING = ((DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__"))
WAITING = ("item", "tolist", "cpu", "numpy", "to", "__bool__", "__int__", "__float__")


class HostWait(NamedTuple):
    """How long the host stood still in all at one line of the script, such as ".item() at train.py:31"."""

    where: str
    times: int
    ns: int


class HostWatch:
    """Watches the thread that makes it, from `start` to `stop`."""

    def __init__(self, emit: Callable[[EventKind], None]):
        self._emit, self._thread = emit, threading.get_ident()
        self._waits: dict[str, HostWait] = {}
        self._patches = ExitStack()

    def start(self) -> None:
        wrapped = [(owner, name, self._fetching) for owner, name in FETCHING]
        for owner, name, wrap in [*wrapped, *((torch.Tensor, name, self._waiting) for name in WAITING)]:
            self._patches.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))

    def stop(self) -> tuple[HostWait, ...]:
        """The waits for a device, the longest first."""
        self._patches.close()
        return tuple(sorted(self._waits.values(), key=lambda wait: -wait.ns))

    def _fetching(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def fetching(loader: Any) -> Any:
            if threading.get_ident() != self._thread:
                return method(loader)
            self._emit(EventKind.DATA_BEGIN)
            try:
                return method(loader)
            finally:
                self._emit(EventKind.DATA_END)

        return fetching

    def _waiting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            if threading.get_ident() != self._thread or not streams.has_streams(tensor.device):
                return method(tensor, *args, **options)
            begin_ns = now_ns()
            try:
                return method(tensor, *args, **options)
            finally:
                caller = sys._getframe(1)
                where = f".{method.__name__}() at {Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
                _, times, ns = self._waits.get(where, HostWait(where, 0, 0))
                self._waits[where] = HostWait(where, times + 1, ns + now_ns() - begin_ns)

        return waiting
