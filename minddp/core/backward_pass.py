"""The phases of a reducer, and one backward: count, pack, launch, wait, unpack.

[Note: the hook is bound]
The time of a hook counts once per parameter, and it runs between two kernels that evict its data from the cache. So
a hook does not ask for the state of the reducer. It calls `GradientHooks.handler`, which the reducer binds again
when its phase changes: from the first gradient of a backward to the last, it is `BackwardPass.mark_ready` itself.

[Note: once per backward]
A gradient that is accumulated again after it was counted would be missing from the average, or be added to it
unreduced. So every parameter keeps its hook in every step, and a hook that fires too often raises an error.
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

from minddp.core.backward_end import AwaitedEnds
from minddp.core.bucket import Bucket
from minddp.core.bucket_store import BucketStore
from minddp.core.events import Event, EventKind, EventStream
from minddp.core.mode import Mode
from minddp.core.reduction import PendingReduction, ReduceStrategy
from minddp.core.usage_tracker import UsageTracker

_log = logging.getLogger(__name__)


class Phase(enum.Enum):
    """The state of a pass, or of a reducer without one. See `ALLOWED` for the transitions."""

    IDLE = "no synchronised backward is due: there is no pass"
    PREPARED = "a forward has run; the next backward will be synchronised"
    ACCUMULATING = "hooks are firing"
    INCOMPLETE = "a backward has ended, but some gradients have not arrived"
    REDUCING = "all buckets have been launched"
    FINALIZING = "waiting for the buckets"
    FINISHED = "a nested backward has put the averages into the gradients, and the outer one is still running"

    __hash__ = object.__hash__  # Enum's own is written in Python, and each transition calls it twice


ALLOWED = {
    Phase.IDLE: {Phase.PREPARED},
    Phase.PREPARED: {Phase.PREPARED, Phase.ACCUMULATING, Phase.IDLE},
    Phase.ACCUMULATING: {Phase.REDUCING, Phase.INCOMPLETE, Phase.IDLE},
    Phase.INCOMPLETE: {Phase.ACCUMULATING, Phase.REDUCING},
    Phase.REDUCING: {Phase.FINALIZING, Phase.INCOMPLETE, Phase.IDLE},
    Phase.FINALIZING: {Phase.FINISHED, Phase.IDLE},
    Phase.FINISHED: {Phase.IDLE},
}


class BackwardPass:
    """One synchronised backward: made when a forward returns, dropped when the averages are in the gradients.

    It has all the state of one backward, so dropping it is the reset, also after an exception.

    The engine refers to the pass through the hooks, so the pass must refer only weakly to the wrapper. The reducer
    passes `on_all_launched()`, `on_ready_twice(param)` and `on_end(pass, backward)` made by `weakly`. The pass
    refers weakly to the strategy, which may hold a user's communication hook.
    """

    def __init__(
        self,
        store: BucketStore,
        usage_tracker: UsageTracker,
        modes: Sequence[Mode],
        events: EventStream,
        on_all_launched: Callable[[], object],
        on_ready_twice: Callable[[int], object],
        on_end: Callable[[BackwardPass, int], object],
        *,
        finalizes_at_end: bool = True,
        is_further: bool = False,
    ):
        self.store = store
        self.usage_tracker = usage_tracker
        self.modes = modes
        self.events = events
        self._packing_modes = [mode for mode in modes if type(mode).before_pack is not Mode.before_pack]
        self._launching_modes = [mode for mode in modes if type(mode).before_launch is not Mode.before_launch]
        self._on_all_launched = on_all_launched
        self._on_ready_twice = on_ready_twice
        self._on_end = on_end

        # The state.
        self.phase = Phase.PREPARED
        self.finalizes_at_end = finalizes_at_end  # if not, the caller of backward calls `Reducer.finish`
        self.is_further = is_further  # a second backward of its forward, through outputs that the first has left
        self.ends = AwaitedEnds(self._on_backward_end, self.note_failure)
        self.is_refused = False  # an error was raised for missing gradients: later ones are not reduced
        self.entered: list[tuple[set[int], int]] = []  # outputs, see `Reducer._hook_outputs`
        self.grads_left: dict[torch.Tensor, TensorWeakRef] | None = None  # by an exception

        # The counts of gradients that have not arrived. Set by the first hook: until then the buckets may change.
        self.hooks_left: list[int] = []  # per parameter; 0: unused, more than 1: a static graph uses it again
        self.params_left: list[int] = []  # per pack group
        self.groups_left: list[int] = []  # per bucket

        self.skipped: set[int] = set()  # buckets: neither packed nor reduced

        # The progress, in order of time.
        self.ready_order: list[int] = []  # parameters
        self.packed: list[int] = []  # pack groups
        self.reductions: list[PendingReduction | None] = []  # one per launched bucket; `None`: skipped

    def begin(self, param: int, reduce_strategy: ReduceStrategy) -> None:
        """The gradient of `param` is the first to arrive."""
        self._reduce_strategy = weakref.ref(reduce_strategy)
        self.scaling = reduce_strategy.begin_pass()
        self.hooks_left = self.usage_tracker.begin_pass()
        self.skipped = self.usage_tracker.skipped_buckets(self.store.plan)
        self._pack_groups = self.store.pack_groups
        self.params_left = list(map(len, self._pack_groups.members))
        self.groups_left = list(self._pack_groups.per_bucket)
        self._group_of = self._pack_groups.of_param
        for mode in self.modes:
            mode.first_gradient(param)

    def _on_backward_end(self, backward: int) -> None:
        self._on_end(self, backward)

    def note_empty(self) -> None:
        """The backward that has entered at outputs reached no parameter: they count as not reached."""
        for forward, place in self.entered:
            forward.add(place)
        self.entered.clear()

    def note_failure(self) -> None:
        """An exception has ended the backward: note which gradients it has left."""
        params = self.usage_tracker.params
        self.grads_left = {param: TensorWeakRef(param.grad) for param in params if param.grad is not None}

    @property
    def has_raised(self) -> bool:
        """True if an exception has ended a backward of this pass, False if one is running, in any thread."""
        self.ends.wait_for_failures()
        return self.grads_left is not None

    @property
    def is_unfinished(self) -> bool:
        """True if backward has ended without an exception, but `.grad` is not averaged."""
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
            self.store.bucket(self._pack_groups.places[group][0])
        self.params_left[group] -= 1
        if not self.params_left[group]:
            self._pack_group(group)

    def mark_without_hook(self, params: Iterable[int]) -> None:
        """These parameters are ready without a hook."""
        for param in params:
            self.hooks_left[param] = 1
            self.mark_ready(param)

    def missing(self) -> list[int]:
        """The parameters whose gradients have not arrived, in order."""
        return [param for param, left in enumerate(self.hooks_left) if left > 0]

    def _pack_group(self, group: int) -> None:
        """All gradients of a pack group have arrived. See [Note: pack groups]."""
        index, group_in_bucket = self._pack_groups.places[group]
        if index not in self.skipped:
            for mode in self._packing_modes:
                mode.before_pack(self._pack_groups.members[group])
            self.events.emit(EventKind.PACK_BEGIN, index)
            with torch.set_grad_enabled(False):  # create_graph=True enables it; no_grad() takes twice as long
                self.store.bucket(index).pack(group_in_bucket, self.scaling)
            self.packed.append(group)
            self.events.emit(EventKind.PACK_END, index)
        self.groups_left[index] -= 1
        if self.groups_left[index] == 0:
            self.events.emit(EventKind.BUCKET_READY, index)
            self._launch_ready_buckets()

    def _launch_ready_buckets(self) -> None:
        """Launch buckets from the head of the plan as long as they are full. See [Note: launch order]."""
        while len(self.reductions) < len(self.groups_left) and self.groups_left[len(self.reductions)] == 0:
            bucket = self.store.bucket(len(self.reductions))
            self.reductions.append(None if bucket.spec.index in self.skipped else self._launch(bucket))
        if len(self.reductions) == len(self.groups_left):
            self._on_all_launched()

    def _launch(self, bucket: Bucket) -> PendingReduction:
        index = bucket.spec.index
        reduce_strategy = self._reduce_strategy()
        if reduce_strategy is None:
            raise RuntimeError(
                f"A communication hook was registered while a backward had yet to reduce bucket {index}, whose "
                f"gradients are scaled for another one. Register it before training."
            )
        if self.scaling.divisor == math.inf:  # the weight is 0, but NaN divided by infinity is NaN
            bucket.comm_buffer.zero_()
        for mode in self._launching_modes:
            mode.before_launch(bucket, bucket.comm_buffer)
        self.events.emit(EventKind.BUCKET_LAUNCHED, index)
        reduction = reduce_strategy.launch(bucket, bucket.comm_buffer, is_last=index == len(self.groups_left) - 1)
        if self.events.sink is not None:
            reduction.when_complete(partial(self.events.sink, Event(EventKind.BUCKET_COMPLETED, index)))
        return reduction

    def wait_and_unpack(self) -> None:
        """Wait for the buckets in launch order and put the averages into `.grad`.

        The gradient of a parameter that no rank has used does not change.
        """
        for mode in self.modes:
            mode.before_unpack()
        globally_unused = self.usage_tracker.close()
        for bucket, reduction in zip(self.store.all(), self.reductions, strict=True):
            if reduction is not None:
                average = reduction.result()
                self.events.emit(EventKind.BUCKET_WAITED, bucket.spec.index)
                with torch.set_grad_enabled(False):
                    slots = bucket.spec.slots
                    bucket.unpack(average, globally_unused and [globally_unused[slot.param] for slot in slots])
                self.events.emit(EventKind.BUCKET_UNPACKED, bucket.spec.index)
            for mode in self.modes:
                mode.after_unpack(bucket)
        self.close()

    def abandon(self) -> None:
        """An exception has ended the backward: wait for the launched buckets, and drop the pass.

        Gradients that are views then hold averages if their bucket was launched, and otherwise this rank's values.
        If a script adds to them without clearing them, the next backward averages the sums.
        """
        self.events.emit(EventKind.ERROR)
        for reduction in filter(None, self.reductions):
            try:
                reduction.result()
            except Exception as error:
                _log.warning("A reduction of the interrupted backward failed too: %s", error)
        self.drop()
        if self.phase is not Phase.PREPARED:
            self.usage_tracker.abandon()

    def drop(self) -> None:
        """Close, without waiting for the launched buckets.

        Gradients that are views get their values back if their bucket was not launched. Otherwise their values are
        undefined.
        """
        for group in self.packed:
            index, group_in_bucket = self._pack_groups.places[group]
            if index >= len(self.reductions):
                with torch.no_grad():
                    self.store.bucket(index).undo_pack(group_in_bucket, self.scaling)
        self.close()

    def close(self) -> None:
        for mode in self.modes:
            mode.post_backward()
        self.store.end_pass()

    def observed_order(self) -> list[int]:
        """Every parameter once: in the order of readiness, unused ones last."""
        unused = dict.fromkeys(self.usage_tracker.last_unused or [])
        return [param for param in self.ready_order if param not in unused] + list(unused)
