"""One rank's end of a lane: what carries sums from host to host, as long as there is somebody to carry them to.

[Note: leaving while something crosses]
A process group of gloo, when it is dropped, first waits for what it still has under way; and that may be for ever,
if a rank on another host is alive but has given up. So a lane with nothing under way is dropped at once, by which
the other end notices that nobody is here any more. If something is under way, it is given a moment to come to an
end, as it does when the other end leaves too. After that, the group is left to the end of the process: the kernel
then closes its connections. That happens only where an all-reduce has failed.
"""

from __future__ import annotations

import ctypes
import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

GRACE_S = 2.0  # for what is under way to end when the lane is abandoned
HEAD_START_S = 5.0  # for the exchange to notice before gloo that time is up: it can say who is missing

Crossing = torch.futures.Future[Any]  # done as soon as a tensor has crossed


class LaneBroken(RuntimeError):
    """What a rank has sent to another host has not arrived, and will not."""


class Lane:
    """All-reduces between ranks `ranks` of the whole group: us and one on each other host."""

    def __init__(self, group: ProcessGroupGloo, ranks: Sequence[int], timeout_s: float):
        self.ranks = ranks
        self._group: ProcessGroupGloo | None = group
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # only `close` may run its destructor
        self._options = dist.AllreduceOptions()
        self._options.timeout = datetime.timedelta(seconds=timeout_s + HEAD_START_S)
        self._under_way: list[Crossing] = []

    def all_reduce(self, tensor: torch.Tensor, on_arrival: Callable[[Crossing], None]) -> Crossing:
        """Begin, in place; `on_arrival` is called, in another thread, when it is over. Then `settle` it."""
        assert self._group is not None, "a lane that is closed is not used"
        work = self._group.allreduce([tensor], self._options)  # type: ignore[attr-defined]
        crossing: Crossing = work.get_future()
        self._under_way.append(crossing)
        crossing.add_done_callback(on_arrival)
        return crossing

    def settle(self, crossing: Crossing) -> None:
        """Let go of one that is over, and of its memory.

        Raises:
            LaneBroken: it has failed.
        """
        self._under_way = [other for other in self._under_way if other is not crossing]
        try:
            crossing.wait()
        except RuntimeError as error:
            ranks = ", ".join(map(str, self.ranks))
            raise LaneBroken(
                f"The all-reduce between hosts, of ranks {ranks}, has failed: {error} One of them, or another rank "
                f"of its host, has ended, or the network is down. Look for the cause there, and start all again."
            ) from error

    def close(self, grace_s: float = 0.0) -> None:
        """If nothing is under way, or not any more after `grace_s` seconds. May be called again."""
        end = time.monotonic() + grace_s
        while not self._is_idle() and time.monotonic() < end:
            time.sleep(0.01)
        if self._group is not None and self._is_idle():
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._group))
            self._group = None

    def abandon(self) -> None:
        """Close, now or never. See [Note: leaving while something crosses]."""
        self.close(GRACE_S)

    def _is_idle(self) -> bool:
        return all(crossing.done() for crossing in self._under_way)


def open_lane(
    store: dist.Store, ranks: Sequence[int], rank: int, connect_timeout_s: float, timeout_s: float
) -> Lane:
    """Connect with the lane's other ranks, by the interface of GLOO_SOCKET_IFNAME or gloo's choice. Collective.

    Raises:
        RuntimeError: one of them cannot be reached, or does not come in time.
    """
    timeout = datetime.timedelta(seconds=connect_timeout_s)
    return Lane(ProcessGroupGloo(store, ranks.index(rank), len(ranks), timeout), ranks, timeout_s)
