"""The states of a reducer, and all that one backward has to remember."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from minddp.comm_hooks import CommHook
from minddp.core.bucket import Bucket
from minddp.core.packing import Scaling
from minddp.modes.rpc import LentGradients
from minddp.modes.sparse import SparseBucket
from minddp.transport.protocols import Work


class Phase(enum.Enum):
    """Where the reducer is. See `ALLOWED` for what may follow what."""

    IDLE = "no synchronised backward is due"
    ARMED = "a forward has run; the next backward will be synchronised"
    ACCUMULATING = "hooks are firing"
    INCOMPLETE = "a backward has ended, but some gradients have not arrived"
    REDUCING = "a backward has ended, and whoever called it has yet to finalize it"
    FINALIZING = "waiting for the buckets"


ALLOWED = {
    Phase.IDLE: {Phase.ARMED},
    Phase.ARMED: {Phase.ARMED, Phase.ACCUMULATING},
    Phase.ACCUMULATING: {Phase.FINALIZING, Phase.INCOMPLETE, Phase.REDUCING, Phase.IDLE},
    Phase.INCOMPLETE: {Phase.ACCUMULATING},
    Phase.REDUCING: {Phase.FINALIZING},
    Phase.FINALIZING: {Phase.IDLE},
}


class Reduction(Protocol):
    """A bucket on its way."""

    def result(self) -> torch.Tensor:
        """Wait, and return the averaged bucket, flat."""
        ...

    def when_complete(self, callback: Callable[[], object]) -> None:
        """Have `callback` called, by any thread, as soon as the collective is complete, whoever waits for it.

        On a GPU it is called at once, with a current stream that the collective precedes. It is never called
        where a backend's work has no future to ask.
        """
        ...


@dataclass(frozen=True)
class AllReduce:
    """The plain way: the buffer is summed in place, and divided only if it has not been before."""

    work: Work
    buffer: torch.Tensor
    divisor: float | None = None

    def result(self) -> torch.Tensor:
        self.work.wait()
        if self.divisor is not None:
            self.buffer.div_(self.divisor)
        return self.buffer

    def when_complete(self, callback: Callable[[], object]) -> None:
        get_future = getattr(self.work, "get_future", None)
        if get_future is not None:
            get_future().add_done_callback(lambda _future: callback())


@dataclass(frozen=True)
class HookedReduction:
    """A communication hook decides what comes back. `watched` is its future, where waits are watched."""

    hook: CommHook
    future: torch._C.Future
    bucket: Bucket | SparseBucket
    watched: Work | None = None

    def result(self) -> torch.Tensor:
        if self.watched is not None:
            self.watched.wait()
        return self.hook.result_of(self.future, self.bucket)

    def when_complete(self, callback: Callable[[], object]) -> None:
        self.future.add_done_callback(lambda _future: callback())


@dataclass(slots=True)
class BackwardPass:
    """What one synchronised backward has to remember.

    `hooks_left[i]` is how often parameter i's hook has still to fire before its gradient is ready: once, but in a
    static graph as often as in its first backward. `runs_left[b]` is how many runs bucket b waits for.
    `reductions[b]` is `None` where a bucket was skipped; buckets from `len(reductions)` on have not been launched.
    `may_hand_over` tells that gradients may come to lie in the buckets. `lent` is where gradients come from that
    do not lie in `.grad`. `is_spoken_for` tells that not every parameter has a hook, see [Note: one hook per run].
    `scaling` is done while packing; `divisor_of_sums` is for sums that are to be divided when they are there.
    """

    hooks_left: list[int]
    runs_left: list[int]
    scaling: Scaling
    divisor_of_sums: float | None = None
    may_hand_over: bool = False
    lent: LentGradients | None = None
    is_spoken_for: bool = False
    unused: list[int] = field(default_factory=list)
    ready_order: list[int] = field(default_factory=list)
    reductions: list[Reduction | None] = field(default_factory=list)

    @property
    def counts_for_nothing(self) -> bool:
        """Whether this rank's gradients have the weight 0."""
        return self.scaling.divisor == math.inf

    @property
    def is_complete(self) -> bool:
        return len(self.reductions) == len(self.runs_left)
