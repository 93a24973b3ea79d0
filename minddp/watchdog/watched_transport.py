"""A transport whose waits are watched: too long, and it asks around, says what is the matter, and gives up.

[Note: how long to wait]
A rank may be slow for a good reason: it evaluates, saves, compiles, while the others are in the next step
already. So waiting long is not an error by itself. After `limit_s` seconds the ranks are asked. If what they say
rules out that the wait will ever end (a rank has exited, collectives differ), `Stuck` is raised with the diagnosis.
If not, the diagnosis is logged and waiting goes on, until the group's own time limit, where torch's error gets the
latest diagnosis added.
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

from minddp.transport.protocols import Transport, Work
from minddp.watchdog.diagnosis import Diagnosis, diagnose
from minddp.watchdog.inquiry import Lookout
from minddp.watchdog.rank_state import Collective, Progress, RankState, where_is_main_thread

_log = logging.getLogger(__name__)
REMEMBERED = 64  # collectives, for comparison with other ranks'


class Stuck(RuntimeError):
    """The ranks cannot go on; the message says who waits for what, and what to do."""


def watched(transport: Transport, limit_s: float | None, progress: Callable[[], Progress]) -> Transport:
    """The transport, watched where it can be: by default, with peers to ask and a store to ask through.

    `progress` is a method that tells where the module's reducer is; its object is referenced weakly.
    """
    if limit_s is None or transport.world_size == 1 or transport.store is None or not transport.waits_again:
        return transport
    return WatchedTransport(transport, transport.store, limit_s, progress)


class WatchedTransport:
    """A transport with an eye on its waits. See [Note: how long to wait]."""

    def __init__(self, transport: Transport, store: dist.Store, limit_s: float, progress: Callable[[], Progress]):
        self._transport = transport
        self._limit_s = limit_s
        self._number = 0
        self._recent: deque[tuple[int, str, int, torch.dtype]] = deque(maxlen=REMEMBERED)
        self._waiting_since: float | None = None
        self._progress = weakref.WeakMethod(progress)
        weak_self = weakref.ref(self)
        self._lookout = Lookout(store, self.rank, self.world_size, lambda: _state_of(weak_self()))
        weakref.finalize(self, self._lookout.close)

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def world_size(self) -> int:
        return self._transport.world_size

    @property
    def store(self) -> dist.Store | None:
        return self._transport.store

    @property
    def waits_again(self) -> bool:
        return self._transport.waits_again

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._transport.allocate(numel, dtype, device)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        self._remember("all-reduce", tensor)  # before it is under way: it may be sparse, and change
        return _WatchedWork(self._transport.all_reduce(tensor), self)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self._remember(f"broadcast from rank {source}", tensor)
        return _WatchedWork(self._transport.broadcast(tensor, source), self)

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """As a sum of parts that do not overlap: a wait that can be watched. For small tensors."""
        parts = tensor.new_zeros(self.world_size, *tensor.shape)
        parts[self.rank] = tensor
        self.all_reduce(parts).wait()
        return list(parts)

    # ------------------------------------------------------------------ watching

    def watch_future(self, tensor: torch.Tensor, future: torch._C.Future) -> Work:
        """What a communication hook has promised to do with `tensor`, to be waited for like a collective."""
        self._remember("communication hook", tensor)
        return _WatchedWork(_Promise(future), self)

    def _remember(self, operation: str, tensor: torch.Tensor) -> None:
        self._number += 1
        self._recent.append((self._number, operation, tensor.numel(), tensor.dtype))

    def wait_for(self, work: Work) -> None:
        """Wait as `work` does, but look up from time to time."""
        self._waiting_since = time.monotonic()
        diagnosis: Diagnosis | None = None
        try:
            while not _done_within(work, self._limit_s):
                diagnosis = self.look_around()
                if diagnosis.is_certain:
                    raise Stuck(diagnosis.text)
                _log.warning("Waited for %.0f s so far. %s", self._waited_s(), diagnosis.text)
        except RuntimeError as error:
            if isinstance(error, Stuck):
                raise
            raise Stuck(f"{error}\n{self.look_around().text}") from error
        finally:
            self._waiting_since = None

    def look_around(self) -> Diagnosis:
        """Ask every rank how it is, and make sense of it."""
        try:
            return diagnose(self._lookout.ask())
        except RuntimeError as error:
            return Diagnosis(f"The store does not answer either ({error}): the rank that hosts it has ended.", True)

    def state(self) -> RankState | None:
        """What this rank says of itself; `None` if the module is gone."""
        progress = self._progress()
        if progress is None:
            return None
        return RankState(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            progress=progress(),
            recent=tuple(
                Collective(number, operation, numel, str(dtype).removeprefix("torch."))
                for number, operation, numel, dtype in tuple(self._recent)
            ),
            waiting_s=None if self._waiting_since is None else self._waited_s(),
            where=where_is_main_thread(),
        )

    def _waited_s(self) -> float:
        return time.monotonic() - (self._waiting_since or time.monotonic())


class _WatchedWork:
    """A collective under way, watched while it is waited for."""

    def __init__(self, work: Work, transport: WatchedTransport):
        self._work = work
        self._transport = transport

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        if timeout is None:
            self._transport.wait_for(self._work)
        else:
            self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def __getattr__(self, name: str) -> Any:
        """Whatever else a backend's work can do, such as tell by a future when it is complete."""
        return getattr(self._work, name)


class _Promise:
    """A future that can be waited for in parts. Its result, or its error, stays in it."""

    def __init__(self, future: torch._C.Future):
        self._is_kept = threading.Event()
        future.add_done_callback(lambda _future: self._is_kept.set())

    def wait(self, timeout: datetime.timedelta = datetime.timedelta.max) -> None:
        if not self._is_kept.wait(min(timeout.total_seconds(), threading.TIMEOUT_MAX)):
            raise RuntimeError(f"Timed out after {timeout.total_seconds():g} s.")

    def is_completed(self) -> bool:
        return self._is_kept.is_set()


def _state_of(transport: WatchedTransport | None) -> RankState | None:
    return None if transport is None else transport.state()


def _done_within(work: Work, limit_s: float) -> bool:
    """Wait for `limit_s` seconds; whether that was enough.

    Gloo's work raises when the time is up, and can be waited for again.
    """
    try:
        work.wait(datetime.timedelta(seconds=limit_s))
    except RuntimeError as error:
        if "timed out" in str(error).lower() and not work.is_completed():
            return False
        raise
    return True
