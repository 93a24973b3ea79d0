"""A transport that diagnoses its long waits, and ends those that can never succeed.

[Note: how long to wait]
A rank may be slow for a good reason: it evaluates, saves or compiles. So a long wait is not an error by itself.
After 1, 2, 4, 8, ... times `limit_s` seconds the ranks report their states, and at once if a rank leaves or its
process ends. If the wait can never end (a rank has exited, collectives differ), `Stuck` is raised with the
diagnosis. Otherwise it is logged. At the group's own time limit torch's error is raised with the latest diagnosis.

[Note: a backward that is dropped]
If a script catches an exception in backward on one rank, the rank's next all-reduce would meet one that the other
ranks have launched in that backward: if the sizes agree, the gradients are silently wrong. So before a rank drops a
backward in which it has launched collectives, all ranks have to drop theirs after equally many; else all raise
`Stuck`. A backward without a launched collective can be dropped at any time.
"""

from __future__ import annotations

import datetime
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.constants import default_pg_timeout

from minddp.core.autograd import weakly
from minddp.extension import Extension
from minddp.tools.watchdog.inquiry import Inquiry
from minddp.tools.watchdog.rank_state import RankState
from minddp.transport.protocols import DropsTogether, Transport, Work

if TYPE_CHECKING:
    from minddp.ddp import DistributedDataParallel

CHECK_WAIT_EVERY_S = 1.0
AT_ONCE_S = 0.001  # torch treats a wait without a timeout as unlimited
MAX_RECENT = 64  # collectives, to compare with those of other ranks


class Stuck(RuntimeError):
    """The ranks cannot go on; the message says which ranks wait for what, and the remedy."""


class WatchedTransport(DropsTogether):
    """Every wait without a timeout of its own is watched. See [Note: how long to wait].

    `state` returns the state of the module's reducer, `None` if the module is gone. It must not keep that alive.
    """

    waits_again = True

    def __init__(self, transport: Transport, limit_s: float, state: Callable[[], RankState | None]):
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.store = transport.store
        self.adds_after_s = transport.adds_after_s
        self.allocate, self.when_group_ends = transport.allocate, transport.when_group_ends
        self._transport = transport
        self._limit_s = limit_s
        self._state_of_module = state
        self._number = self._num_settled = 0  # of collectives launched, and of those launched on all ranks
        self._recent: deque[tuple[int, str]] = deque(maxlen=MAX_RECENT)  # collectives, with their numbers
        self._waiting_since: float | None = None
        self._drops = False
        self._stuck = ""  # the reason after `Stuck` was raised or `end_waits` was called

    @cached_property
    def _inquiry(self) -> Inquiry:
        """Made at the first collective, which all ranks launch; a copy of the wrapper on one rank has none."""
        inquiry = Inquiry(self._transport, weakly(self.state))
        weakref.finalize(self, inquiry.close)
        inquiry.group_end = self.when_group_ends(inquiry.close)
        return inquiry

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        self._record("all-reduce", tensor)  # before the launch: a sparse tensor changes after it
        return _WatchedWork(self._transport.all_reduce(tensor), self)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self._record(f"broadcast from rank {source}", tensor)
        return _WatchedWork(self._transport.broadcast(tensor, source), self)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, sizes_in: Sequence[int], sizes_out: Sequence[int]
    ) -> Work:
        self._record("all-to-all", sent[:0])  # sizes differ by rank
        return _WatchedWork(self._transport.all_to_all(received, sent, sizes_in, sizes_out), self)

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """An all-reduce of disjoint parts, since its wait can be watched. For small tensors."""
        parts = tensor.new_zeros(self.world_size, *tensor.shape)
        parts[self.rank] = tensor
        self.all_reduce(parts).wait()
        return list(parts)

    def watch_future(self, tensor: torch.Tensor, future: torch._C.Future) -> Callable[[], None]:
        """A function that waits for the future of a communication hook. An error stays in the future."""
        self._record("communication hook", tensor)
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        return partial(self.wait_until, done.wait)

    def wait_until(self, completes_within: Callable[[float], bool]) -> None:
        """Wait until `completes_within(seconds)` returns True; if that takes long, ask the ranks.

        Raises:
            Stuck: the wait can never end, or has failed.
        """
        start = self._waiting_since = time.monotonic()
        check_every_s = AT_ONCE_S if self._stuck else min(self._limit_s, CHECK_WAIT_EVERY_S)
        try:
            while not completes_within(check_every_s):
                reason = self._stuck or self._reason_to_give_up(time.monotonic() - start)
                # Messages that a rank has sent before it left may still arrive.
                if reason is not None and (self._stuck or not completes_within(check_every_s)):
                    self._stuck = self._inquiry.settle(reason)
                    raise Stuck(self._stuck)
        except Stuck:
            raise
        except RuntimeError as error:
            self._stuck = self._stuck or self._inquiry.settle(
                f"{error}\n{self._inquiry.diagnose(self._is_stuck).text}"
            )
            raise Stuck(self._stuck) from error
        finally:
            self._waiting_since = None

    def end_waits(self, reason: str) -> None:
        """End this rank's wait and all later ones with `Stuck`. May be called by any thread."""
        self._stuck = reason

    def _reason_to_give_up(self, waited_s: float) -> str | None:
        return self._inquiry.examine(waited_s, self._limit_s, f"collective {self._number}", self._is_stuck)

    def _is_stuck(self) -> bool:
        return bool(self._stuck)

    def settle(self) -> None:
        """All ranks have launched the same collectives so far."""
        self._num_settled = self._number

    def agree_to_drop(self) -> None:
        """Wait until all ranks drop their backward, or raise `Stuck`. See [Note: a backward that is dropped]."""
        if self._number == self._num_settled:
            return
        self._drops = True
        limit_s = default_pg_timeout.total_seconds()
        all_arrive_within = self._inquiry.messages.arrive("dropped after", self._number, limit_s=limit_s)
        if not all_arrive_within(CHECK_WAIT_EVERY_S):
            self._inquiry.alarm()
            self.wait_until(all_arrive_within)
        self._drops = False
        self.settle()

    def state(self) -> RankState | None:
        """This rank's state; `None` if the module is gone."""
        if (state := self._state_of_module()) is None:
            return None
        waiting_s = None if (since := self._waiting_since) is None else time.monotonic() - since
        return replace(state, recent=dict(self._recent), waiting_s=waiting_s, drops=self._drops)

    def _record(self, operation: str, tensor: torch.Tensor) -> None:
        if self._stuck:  # the script has caught it; its next collective would meet an earlier one of other ranks
            raise Stuck(self._stuck)
        _ = self._inquiry
        self._number += 1
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._recent.append((self._number, f"{operation} of {tensor.numel():,} {dtype}"))


class _WatchedWork:
    """A work whose wait is watched, unless it has a timeout."""

    def __init__(self, work: Work, transport: WatchedTransport):
        self._work = work
        self._transport = transport
        self.is_completed = work.is_completed

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        if timeout is None:
            self._transport.wait_until(self._completes_within)
        else:
            self._work.wait(timeout)

    def _completes_within(self, limit_s: float) -> bool:
        """After a timeout the work can be waited for again."""
        try:
            self._work.wait(datetime.timedelta(seconds=limit_s))
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise
            if not self._work.is_completed():
                return False
            self._work.wait(datetime.timedelta(0))  # it has completed since, or exceeded a limit of its own
        return True

    def __getattr__(self, name: str) -> Any:
        """Other attributes of a backend's work, such as `get_future`."""
        return getattr(self._work, name)


@dataclass(eq=False)
class WatchedWaits(Extension):
    """Diagnoses waits for other ranks that take longer than `limit_s`."""

    limit_s: float

    def wrap_transport(self, transport: Transport, ddp: DistributedDataParallel) -> Transport:
        """Watched if there are peers and a store to ask them, and its waits can be interrupted."""
        if transport.world_size == 1 or transport.store is None or not transport.waits_again:
            return transport
        return WatchedTransport(transport, self.limit_s, partial(state_of, weakref.ref(ddp)))


def state_of(ddp_ref: Callable[[], DistributedDataParallel | None]) -> RankState | None:
    """Called from another thread, so it changes nothing."""
    if (ddp := ddp_ref()) is None:
        return None
    if (reducer := getattr(ddp, "_reducer", None)) is None:  # in construction
        return RankState()
    missing = reducer.current.missing() if reducer.current is not None else ()
    names = tuple(reducer.store.plan.params[param].name for param in missing)
    return RankState(reducer.phase.name, reducer.num_passes, not ddp.require_backward_grad_sync, names)
