"""The phases of a reducer, and one backward: count, pack, launch, wait, unpack.

[Note: the hook is bound]
A hook costs what it executes times the number of parameters, and it runs between two kernels that have just
evicted its data from the cache. So a hook does not ask in which state the reducer is. It calls
`GradientHooks.handler`, which the reducer binds anew when its phase changes: from the first gradient of a backward
to the last, it is `BackwardPass.mark_ready` itself.

[Note: once per backward]
A gradient that is accumulated again after it was counted would be missing from the average, or be added to it
unreduced. So every parameter keeps its hook in every step, and one that fires more often than expected is an error.
"""

from __future__ import annotations

import enum
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch.utils.weak import TensorWeakRef

from minddp.core.autograd import weakly
from minddp.core.backward_end import PassEnds
from minddp.core.bucket import GradientBucket
from minddp.core.bucket_store import BucketStore
from minddp.core.events import Event, EventKind, EventStream
from minddp.core.expectation import Expectation
from minddp.core.mode import Mode
from minddp.core.reduction import PendingReduction, ReduceStrategy

_log = logging.getLogger(__name__)


class Phase(enum.Enum):
    """The state of a pass, or of a reducer without one. See `ALLOWED` for the transitions."""

    IDLE = "no synchronised backward is due: there is no pass"
    ARMED = "a forward has run; the next backward will be synchronised"
    ACCUMULATING = "hooks are firing"
    INCOMPLETE = "a backward has ended, but some gradients have not arrived"
    REDUCING = "all buckets are under way"
    FINALIZING = "waiting for the buckets"
    FINISHED = "the averages are in the gradients, and a backward around the one that brought them still runs"

    __hash__ = object.__hash__  # Enum's own is written in Python, and each transition asks for it twice


ALLOWED = {
    Phase.IDLE: {Phase.ARMED},
    Phase.ARMED: {Phase.ARMED, Phase.ACCUMULATING},
    Phase.ACCUMULATING: {Phase.REDUCING, Phase.INCOMPLETE, Phase.IDLE},
    Phase.INCOMPLETE: {Phase.ACCUMULATING, Phase.REDUCING},
    Phase.REDUCING: {Phase.FINALIZING, Phase.INCOMPLETE, Phase.IDLE},
    Phase.FINALIZING: {Phase.FINISHED, Phase.IDLE},
    Phase.FINISHED: {Phase.IDLE},
}


class BackwardPass:
    """One synchronised backward: made when a forward returns, dropped when the averages are in the gradients.

    All that one backward needs is in here. So an exception leaves nothing half reset: the next forward drops the
    pass.

    The engine refers to the pass by the hooks, so the pass refers only weakly to what may refer to the wrapper: to
    the methods of the reducer, `on_all_launched()`, `on_ready_twice(param)` and `on_end(pass, backward)`, and to
    what reduces the buckets, which may hold a user's communication hook.
    """

    def __init__(
        self,
        store: BucketStore,
        expectation: Expectation,
        modes: Sequence[Mode],
        events: EventStream,
        on_all_launched: Callable[[], object],
        on_ready_twice: Callable[[int], object],
        on_end: Callable[[BackwardPass, int], object],
        *,
        finalizes_at_end: bool = True,
    ):
        self.store = store
        self.expectation = expectation
        self.modes = modes
        self.events = events
        self._packing_modes = [mode for mode in modes if type(mode).before_pack is not Mode.before_pack]
        self._on_all_launched = weakly(on_all_launched)
        self._on_ready_twice = weakly(on_ready_twice)
        self._on_end = weakly(on_end)

        # How far it has come.
        self.phase = Phase.ARMED
        self.finalizes_at_end = finalizes_at_end  # if not, the caller of backward does so
        self.ends = PassEnds(self._on_backward_end, self.note_failure)
        self.is_refused = False  # an error was raised because gradients are missing: further ones come too late
        self.grads_left: dict[torch.Tensor, TensorWeakRef] | None = None  # by an exception

        # What is still awaited. Filled by the first hook: until then the buckets may change.
        self.hooks_left: list[int] = []  # per parameter; 0: left out, more than 1: a static graph uses it again
        self.params_left: list[int] = []  # per pack group
        self.groups_left: list[int] = []  # per bucket

        # What has come, in this order.
        self.ready_order: list[int] = []  # parameters
        self.packed: list[int] = []  # pack groups
        self.reductions: list[PendingReduction | None] = []  # of the buckets launched so far; `None`: skipped
        self.unused_grads: dict[int, torch.Tensor] = {}  # copies; see `Scaling.restores_unused`

    def open(self, param: int, reducing: ReduceStrategy) -> None:
        """The gradient of `param` is the first to arrive."""
        self._reducing = weakref.ref(reducing)
        self.scaling = reducing.open()
        self.hooks_left = self.expectation.open()
        self.params_left = [len(params) for params in self.store.members]
        self.groups_left = list(self.store.groups_per_bucket)
        self._group_of = self.store.group_of
        for mode in self.modes:
            mode.opened(param)

    def _on_backward_end(self, backward: int) -> None:
        self._on_end(self, backward)

    def note_failure(self) -> None:
        """An exception has ended the backward: note which gradients it leaves behind."""
        params = self.expectation.params
        self.grads_left = {param: TensorWeakRef(param.grad) for param in params if param.grad is not None}

    @property
    def is_unfinished(self) -> bool:
        """True if its backward has ended without an exception, and `.grad` is not averaged."""
        has_ended = self.grads_left is None and not self.ends.is_any_awaited()
        is_open = self.phase in (Phase.ACCUMULATING, Phase.REDUCING)
        return self.phase is Phase.INCOMPLETE or (is_open and has_ended)

    def mark_ready(self, param: int) -> None:
        """A hook has fired. See [Note: the hook is bound]."""
        left = self.hooks_left[param] - 1
        self.hooks_left[param] = left
        if left:
            if left < 0:
                self._on_ready_twice(param)
            return
        self.ready_order.append(param)
        if self.events.sink is not None:
            self.events.sink(Event(EventKind.PARAM_READY, param))
        group = self._group_of[param]
        if self.store.is_lazy:
            self.store.bucket(self.store.groups[group][0])
        self.params_left[group] -= 1
        if not self.params_left[group]:
            self._pack_group(group)

    def mark_without_hook(self, params: Iterable[int]) -> None:
        """No hooks will be counted for these parameters: they are ready."""
        if self.scaling.restores_unused:
            for param in self.expectation.last_unused or ():
                if (grad := self.expectation.params[param].grad) is not None:
                    self.unused_grads[param] = grad.detach().clone()
        for param in params:
            self.hooks_left[param] = 1
            self.mark_ready(param)

    def missing(self) -> list[int]:
        """The parameters that are still awaited, in order."""
        return [param for param, left in enumerate(self.hooks_left) if left > 0]

    def _pack_group(self, group: int) -> None:
        """All gradients of a pack group are there. See [Note: pack groups]."""
        index, group_in_bucket = self.store.groups[group]
        for mode in self._packing_modes:
            mode.before_pack(self.store.members[group])
        self.events.emit(EventKind.PACK_BEGIN, index)
        with torch.set_grad_enabled(False):  # backward(create_graph=True) enables it; no_grad() takes twice as long
            self.store.bucket(index).pack(group_in_bucket, self.scaling)
        self.packed.append(group)
        self.events.emit(EventKind.PACK_END, index)
        self.groups_left[index] -= 1
        if self.groups_left[index] == 0:
            self.events.emit(EventKind.BUCKET_READY, index)
            self._launch_ready_buckets()

    def _launch_ready_buckets(self) -> None:
        """Launch from the head of the plan for as long as buckets are full. See [Note: launch order]."""
        while len(self.reductions) < len(self.groups_left) and self.groups_left[len(self.reductions)] == 0:
            bucket = self.store.bucket(len(self.reductions))
            self.reductions.append(None if self.expectation.skips(bucket.spec) else self._launch(bucket))
        if len(self.reductions) == len(self.groups_left):
            self._on_all_launched()

    def _launch(self, bucket: GradientBucket) -> PendingReduction:
        index = bucket.spec.index
        reducing = self._reducing()
        if reducing is None:
            raise RuntimeError(
                f"A communication hook was registered while a backward had yet to reduce bucket {index}, whose "
                f"gradients are scaled for another one. Register it before training."
            )
        if self.scaling.divisor == math.inf:  # the weight is 0, but a NaN that is divided by infinity stays NaN
            bucket.wire.zero_()
        for mode in self.modes:
            mode.before_launch(bucket, bucket.wire)
        self.events.emit(EventKind.BUCKET_LAUNCHED, index)
        reduction = reducing.launch(bucket, bucket.wire, is_last=index == len(self.groups_left) - 1)
        self.events.emit(EventKind.LAUNCH_END, index)
        if self.events.sink is not None:
            reduction.when_complete(partial(self.events.sink, Event(EventKind.BUCKET_COMPLETED, index)))
        return reduction

    def wait_and_unpack(self) -> None:
        """Wait for the buckets in launch order and put the averages where the optimizer will look.

        The gradient of a parameter that no rank has used stays as it is.
        """
        for mode in self.modes:
            mode.before_unpack()
        untouched = self.expectation.close()
        if self.expectation.finds_unused or self.expectation.is_static:
            self.events.emit(EventKind.USAGE_EXCHANGED)
        for bucket, reduction in zip(self.store.all(), self.reductions, strict=True):
            if reduction is not None:
                average = reduction.result()
                self.events.emit(EventKind.BUCKET_WAITED, bucket.spec.index)
                with torch.set_grad_enabled(False):
                    here = None if untouched is None else [untouched[slot.param] for slot in bucket.spec.slots]
                    bucket.unpack(average, here)
                    self._restore_unused(bucket, untouched)
                self.events.emit(EventKind.BUCKET_UNPACKED, bucket.spec.index)
            for mode in self.modes:
                mode.after_unpack(bucket)
        self.close()

    def _restore_unused(self, bucket: GradientBucket, untouched: Sequence[bool] | None) -> None:
        for slot, param in zip(bucket.spec.slots, bucket.params, strict=True):
            before = self.unused_grads.get(slot.param)
            if before is not None and param.grad is not None and untouched is not None and untouched[slot.param]:
                param.grad.copy_(before)

    def abandon(self) -> None:
        """An exception has ended the backward: let what is under way arrive, and drop it.

        Gradients that are views then hold averages if their bucket was launched, and else this rank's values: what
        a script adds to without clearing them is averaged by the next backward.
        """
        self.events.emit(EventKind.ERROR)
        for reduction in filter(None, self.reductions):
            try:
                reduction.result()
            except Exception as error:
                _log.warning("A reduction of the interrupted backward failed too: %s", error)
        self.drop()
        self.expectation.abandon()

    def drop(self) -> None:
        """Close, without waiting for what is under way.

        Gradients that are views have their values back where they were packed into a bucket that was not launched.
        What they hold where it was launched is known to no rank.
        """
        for group in self.packed:
            index, group_in_bucket = self.store.groups[group]
            if index >= len(self.reductions):
                with torch.no_grad():
                    self.store.bucket(index).undo_pack(group_in_bucket, self.scaling)
        self.close()

    def close(self) -> None:
        for mode in self.modes:
            mode.closed()
        self.store.end_pass()

    def observed_order(self) -> list[int]:
        """Every parameter once: as they became ready, and then those that are unused."""
        unused = dict.fromkeys(self.expectation.last_unused or [])
        return [param for param in self.ready_order if param not in unused] + list(unused)
