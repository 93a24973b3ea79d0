"""A transport that diagnoses its long waits, and ends those that can never succeed.

[Note: how long to wait]
A rank may be slow for a good reason: it evaluates, saves or compiles. So a long wait is not an error by itself.
After `limit_s` seconds the ranks are asked for their states. If these rule out that the wait will ever end (a rank
has exited, collectives differ), `Stuck` is raised with the diagnosis. If not, the diagnosis is logged and the rank
waits on, until the group's own time limit, when torch's error is raised with the latest diagnosis.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minddp.core.autograd import weakly
from minddp.transport.protocols import Transport, Work
from minddp.watchdog.diagnosis import Diagnosis, diagnose
from minddp.watchdog.inquiry import Inquiry
from minddp.watchdog.rank_state import Collective, Progress, RankState, where_is_main_thread

_log = logging.getLogger(__name__)
MAX_RECENT = 64  # collectives, to compare with those of other ranks


class Stuck(RuntimeError):
    """The ranks cannot go on; the message says which ranks wait for what, and the remedy."""


def watched(transport: Transport, limit_s: float | None, progress: Callable[[], Progress]) -> Transport:
    """The transport, watched if there is a limit, and peers and a store to ask, and waits can be interrupted.

    `progress` is a method that reports where the module's reducer is; its object is referenced weakly.
    """
    if limit_s is None or transport.world_size == 1 or transport.store is None or not transport.waits_again:
        return transport
    return WatchedTransport(transport, transport.store, limit_s, progress)


class WatchedTransport:
    """Every wait without a timeout of its own is watched. See [Note: how long to wait]."""

    waits_again = True

    def __init__(self, transport: Transport, store: dist.Store, limit_s: float, progress: Callable[[], Progress]):
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.store: dist.Store | None = store
        self._transport = transport
        self._limit_s = limit_s
        self._number = 0
        self._recent: deque[Collective] = deque(maxlen=MAX_RECENT)
        self._waiting_since: float | None = None
        self._progress = weakly(progress)
        self._inquiry = Inquiry(store, self.rank, self.world_size, weakly(self.state))
        weakref.finalize(self, self._inquiry.close)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._transport.allocate(numel, dtype, device)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        self._record("all-reduce", tensor)  # before the launch: a sparse tensor changes after it
        return _WatchedWork(self._transport.all_reduce(tensor), self)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self._record(f"broadcast from rank {source}", tensor)
        return _WatchedWork(self._transport.broadcast(tensor, source), self)

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """As a sum of parts that do not overlap, whose wait can be watched. For small tensors."""
        parts = tensor.new_zeros(self.world_size, *tensor.shape)
        parts[self.rank] = tensor
        self.all_reduce(parts).wait()
        return list(parts)

    # ------------------------------------------------------------------ watching

    def watch_future(self, tensor: torch.Tensor, future: torch._C.Future) -> Work:
        """The future that a communication hook has returned for `tensor`, as a work whose wait is watched."""
        self._record("communication hook", tensor)
        return _WatchedWork(_FutureWork(future), self)

    def wait_for(self, work: Work) -> None:
        """Wait for `work`; every `limit_s` seconds, ask the ranks.

        Raises:
            Stuck: the wait can never end, or has failed.
        """
        start = self._waiting_since = time.monotonic()
        try:
            while not _completes_within(work, self._limit_s):
                diagnosis = self._diagnose()
                if diagnosis.is_certain:
                    raise Stuck(diagnosis.text)
                _log.warning("Waited for %.0f s so far. %s", time.monotonic() - start, diagnosis.text)
        except Stuck:
            raise
        except RuntimeError as error:
            raise Stuck(f"{error}\n{self._diagnose().text}") from error
        finally:
            self._waiting_since = None

    def state(self) -> RankState | None:
        """This rank's state; `None` if the module is gone."""
        progress = self._progress()
        if progress is None:
            return None
        return RankState(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            progress=progress,
            recent=tuple(self._recent),
            waiting_s=None if (since := self._waiting_since) is None else time.monotonic() - since,
            where=where_is_main_thread(),
        )

    def _record(self, operation: str, tensor: torch.Tensor) -> None:
        self._number += 1
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._recent.append(Collective(self._number, operation, tensor.numel(), dtype))

    def _diagnose(self) -> Diagnosis:
        try:
            return diagnose(self._inquiry.ask())
        except RuntimeError as error:
            return Diagnosis(f"The store does not answer either ({error}): the rank that hosts it has ended.", True)


class _WatchedWork:
    """A work whose wait is watched, unless it has a timeout."""

    def __init__(self, work: Work, transport: WatchedTransport):
        self._work = work
        self._transport = transport
        self.is_completed = work.is_completed

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        if timeout is None:
            self._transport.wait_for(self._work)
        else:
            self._work.wait(timeout)

    def __getattr__(self, name: str) -> Any:
        """Whatever else a backend's work has, such as `get_future`."""
        return getattr(self._work, name)


class _FutureWork:
    """Waits for a future with a timeout. The result, or the error, stays in the future."""

    def __init__(self, future: torch._C.Future):
        self._done = threading.Event()
        self.is_completed = self._done.is_set
        future.add_done_callback(lambda _: self._done.set())

    def wait(self, timeout: datetime.timedelta = datetime.timedelta.max) -> None:
        if not self._done.wait(min(timeout.total_seconds(), threading.TIMEOUT_MAX)):
            raise RuntimeError(f"Timed out after {timeout.total_seconds():g} s.")


def _completes_within(work: Work, limit_s: float) -> bool:
    """Wait for at most `limit_s` seconds. A work that has timed out can be waited for again."""
    try:
        work.wait(datetime.timedelta(seconds=limit_s))
    except RuntimeError as error:
        if "timed out" in str(error).lower() and not work.is_completed():
            return False
        raise
    return True
