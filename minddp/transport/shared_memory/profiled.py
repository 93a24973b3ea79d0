"""Collectives in torch's profiler, where a backend's own stand.

Under the names that gloo gives to its own: that is what people search a profile for, and what tools add up. And as
the profiler marks what is asynchronous: an event that ends on another thread than it began on.
"""

from __future__ import annotations

import threading
from typing import Any, Literal, cast

import torch
from torch.autograd.profiler import record_function

Name = Literal["gloo:all_reduce", "gloo:broadcast"]
GRACE_S = 10.0  # for an event to end


def record_if_profiled(name: Name) -> Recorded | None:
    """An event from now on, if anybody profiles."""
    return Recorded(name) if torch.autograd._profiler_enabled() else None


class Recorded:
    """An event in a profile, until its `end`.

    Who waits for a collective must wait for its event, too: one that ends after the profiler has stopped ends in
    freed memory.
    """

    def __init__(self, name: Name):
        event, self._has_ended = record_function(name), threading.Event()
        event.__enter__()
        self._future: Any = torch.futures.Future()
        event._call_end_callbacks_on_future(cast(torch.futures.Future, self._future))

    def end(self) -> None:
        """May be called by any thread, and returns at once."""
        threading.Thread(target=self._end).start()

    def _end(self) -> None:
        self._future.set_result(None)
        self._has_ended.set()

    def wait(self) -> None:
        self._has_ended.wait(GRACE_S)
