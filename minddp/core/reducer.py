"""The backward pass, from hook to `.grad`: hooks count, buckets are launched in plan order, the end waits for them.

    forward        backward begins          hooks              end of backward
    arm()     ->   first hook: a pass   ->  count, pack,   ->  wait in order, unpack,
                   is opened                launch             drop the pass

- What triggers a launch? The last hook of the pack group that fills last in a bucket, once all buckets before it in
  the plan are launched: `BackwardPass._launch_ready_buckets`.
- Where is the mean taken? While a group is packed, `PackGroup.pack`, unless the `Reducing` divides later or not at
  all. See [Note: the mean is taken first].
- What waits, and when? The end of backward, for one bucket after the other: `BackwardPass.wait_and_unpack`.
- What does an exception leave behind? A pass, which the next forward drops: `ensure_finished`.

Three parts are pluggable: an `Expectation` (which gradients will come), a `Reducing` (what reduces a bucket) and
`MakeBucket` (what a bucket is). `Mode`s are called at the points that `Mode` lists.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.weak import TensorWeakRef

from minddp.core import autograd
from minddp.core.backward_end import BackwardEnd
from minddp.core.backward_pass import ALLOWED, WITH_GUARD, BackwardPass, Phase
from minddp.core.bucket import GradientBucket
from minddp.core.bucket_store import BucketStore
from minddp.core.errors import cannot_finalize, ready_twice, second_backward, still_running
from minddp.core.events import EventKind, EventStream
from minddp.core.expectation import Expectation
from minddp.core.mode import Mode
from minddp.core.plan import BucketPlan
from minddp.core.reduction import Reducing
from minddp.core.unfinished import UnfinishedReduction
from minddp.transport.protocols import Transport


class Reducer:
    """Averages the gradients of `hooks.params` over the ranks of `transport` in every armed backward.

    `modes` are called in order, at the points that `Mode` lists. `num_passes` counts synchronised backwards.
    """

    def __init__(
        self,
        hooks: autograd.GradientHooks,
        transport: Transport,
        store: BucketStore,
        expectation: Expectation,
        reducing: Reducing,
        unfinished: UnfinishedReduction,
        modes: Sequence[Mode] = (),
    ):
        self.hooks = hooks
        self.params = hooks.params
        self.transport = transport
        self.store = store
        self.expectation = expectation
        self.reducing = reducing
        self.modes = list(modes)
        self.unfinished = unfinished
        self.events = EventStream()
        self.phase = Phase.IDLE
        self.current: BackwardPass | None = None
        self.num_passes = 0
        self.backward_end = BackwardEnd(self._on_backward_end, self._on_gradient_enters, self.on_failure)
        self._finalizes_at_end = True
        self._slow_hook = autograd.weakly(self._on_hook)
        hooks.on_error = autograd.weakly(self.events.report)
        self._bind_hooks()
        unfinished.settled(transport)
        # The module may outlive its wrapper and be wrapped again: old hooks must not fire beside new ones.
        weakref.finalize(self, hooks.remove).atexit = False

    @property
    def plan(self) -> BucketPlan:
        return self.store.plan

    @property
    def buckets(self) -> list[GradientBucket]:
        """In launch order. Those that do not exist yet are made."""
        return self.store.all()

    # ------------------------------------------------------------------ called around forward

    def arm(self, output: Any, *, finalize_at_end: bool = True) -> None:
        """A forward that wants its backward synchronised has returned `output`.

        Unless `finalize_at_end`, the caller of backward calls `finish` as well.
        """
        if not self.params:  # all of them are delayed
            return
        is_first = self.num_passes == 0 and self.phase is Phase.IDLE
        self._enter(Phase.ARMED)
        self._finalizes_at_end = finalize_at_end
        for mode in self.modes:
            mode.armed()
        self.expectation.armed(output, is_first=is_first)
        # In the recorded backward, callbacks that hooks of the output queue for the end read averages, as in torch.
        self.backward_end.watch(output, before_other_hooks=self.expectation.is_recording)

    def ensure_finished(self) -> None:
        """Raise if an earlier backward left gradients unreduced; drop one that an exception cut short.

        Raises:
            RuntimeError: see [Note: unfinished reduction] and [Note: a backward that is dropped].
        """
        if self.phase is Phase.ACCUMULATING and self.backward_end.is_awaited_here:
            raise still_running()
        never_ended = self.phase is Phase.ACCUMULATING and not self.backward_end.is_awaited
        if never_ended or self.phase in (Phase.INCOMPLETE, Phase.REDUCING):
            raise self.unfinished.error(self)
        if self.current is not None:
            self.unfinished.agree_to_drop(self.transport, self.num_passes, len(self.current.reductions))
            self.current.abandon()
            self.backward_end.wait_for_futures()  # of its buffer hook: this forward may read what they write
            self._enter(Phase.IDLE)
        self.backward_end.reset()
        self.expectation.forward_begins()

    def rebuild_if_due(self) -> bool:
        """Bucket by the order that the first backward has shown. Collective; true once. See [Note: two plans]."""
        return self.store.rebuild_if_due(self.transport, self.events)

    # ------------------------------------------------------------------ hooks

    def _bind_hooks(self) -> None:
        """See [Note: the hook is bound]."""
        handler = self._slow_hook
        if self.current is not None and self.phase is Phase.ACCUMULATING and not self.expectation.is_recording:
            handler = self.current.mark_ready
        opens_pass = self.phase is Phase.ARMED  # which binds anew before the first gradient is counted
        self.hooks.handler = handler if opens_pass else self.expectation.wrap_hook(handler)

    def _on_hook(self, param: int) -> None:
        """The gradient of `param` has been accumulated, and counting it is not all there is to do."""
        if self.phase is Phase.IDLE and not self.backward_end.is_awaited:
            # no_sync, a second backward through one graph, or through an earlier forward
            if self.expectation.is_static and self.backward_end.is_rest_here:
                raise second_backward(self.plan.params[param].name)
            self.events.emit(EventKind.GRADIENT_KEPT, param)
        elif self.phase is Phase.ARMED:
            self._open_pass(param)
            self.hooks.handler(param)
        elif self.phase is Phase.ACCUMULATING:
            self._await_end()  # also of the outer backward, if the first hook was in a nested one
            self.expectation.record(param)
        elif self.phase is Phase.INCOMPLETE and self.current is not None and self.current.is_refused:
            self.events.emit(EventKind.GRADIENT_KEPT, param)  # to the end, or cleared gradients would come back
        elif self.phase is Phase.INCOMPLETE:  # a further backward brings more
            self._enter(Phase.ACCUMULATING)
            self._await_end()
            self.hooks.handler(param)
        else:  # all buckets are under way, or have been finalized in a backward that was nested in this one
            self._on_ready_twice(param)

    def _open_pass(self, param: int) -> None:
        """The first hook of an armed backward, that of `param`."""
        self.store.begin_pass()
        parts = (self.store, self.expectation, self.reducing, self.modes, self.events)
        self.current = BackwardPass(*parts, self._on_all_launched, self._on_ready_twice)
        self.num_passes += 1
        self._enter(Phase.ACCUMULATING)
        self._await_end()
        self._check_conversions(self.expectation.last_unused or ())
        self.current.open(param)

    def _check_conversions(self, params: Iterable[int]) -> None:
        self.hooks.check(params, lambda param: self.plan.params[param].name)

    def _on_all_launched(self) -> None:
        self._await_end()
        self.expectation.all_launched(self.transport)

    def _on_ready_twice(self, param: int) -> None:
        static = self.expectation.is_static
        if static and self.phase is Phase.ACCUMULATING:
            self._enter(Phase.INCOMPLETE)  # what was recorded is wrong: the next forward will say so too
        raise ready_twice(param, self.plan.params[param].name, static_graph=static)

    # ------------------------------------------------------------------ the end of backward

    def _on_gradient_enters(self, is_rest: bool) -> None:
        """A backward comes in at the outputs: the one that the user called, not one nested in it."""
        is_over = self.phase is Phase.IDLE and not self.backward_end.is_awaited
        if is_rest and is_over and self.expectation.ends_with_each_backward:
            reasons = [mode.cannot_add for mode in self.modes if mode.cannot_add]
            if reasons and any(param.grad is not None for param in self.params):
                raise RuntimeError(f"`.grad` holds the result of another backward of this forward: {reasons[0]}.")
            self._enter(Phase.ARMED)
        if self.phase is Phase.ARMED and not self.backward_end.is_awaited_here:
            for mode in self.modes:
                mode.backward_begins()
            self.expectation.backward_begins()
        self._await_end()

    def _await_end(self) -> None:
        """Be called at the end of the backward that is running. See [Note: which backward ends]."""
        if self.phase is not Phase.IDLE and self.backward_end.await_end():
            self.events.emit(EventKind.BACKWARD_BEGIN)
            if self.phase is Phase.INCOMPLETE:
                self._enter(Phase.ACCUMULATING)

    def _on_backward_end(self, is_nested: bool) -> None:
        with self.events.reporting():
            if self.current is None or self.phase is Phase.REDUCING:
                self.expectation.backward_was_empty()  # it has reached no parameter, or ends a second time
                if self.phase is Phase.ARMED:
                    self._check_conversions([0])
            elif self.current.all_launched:
                self.events.emit(EventKind.GRADIENTS_COMPLETE)
                self._end_pass(self.current)
            elif is_nested or self.phase is Phase.INCOMPLETE:
                return  # the outer backward brings more, or has brought no more
            elif self.expectation.is_recording and self.backward_end.came_in_at_outputs:
                self.events.emit(EventKind.GRADIENTS_COMPLETE)
                self.reduce_recorded()
            else:
                self._enter(Phase.INCOMPLETE)
                if not self.expectation.is_recording:
                    self.unfinished.warn(self.current.missing(), self.transport.rank)

    def reduce_recorded(self) -> None:
        """Backward has only recorded what it brings (the first one of a static graph): reduce it all at once."""
        if self.current is None or not self.expectation.is_recording:
            return
        self.expectation.recorded()
        self._check_conversions(self.expectation.last_unused or ())
        self.current.mark_without_hook(range(len(self.params)))
        self._end_pass(self.current)

    def _end_pass(self, current: BackwardPass) -> None:
        """Backward has ended, and all buckets are under way."""
        if self._finalizes_at_end:
            self._finalize(current)
        else:
            self._enter(Phase.REDUCING)

    def finish(self, *, is_required: bool = True) -> None:
        """Finalize a backward that was not to do so by itself: after it, or in it once all buckets are under way.

        Raises:
            RuntimeError: some gradients have not arrived, there is no such backward, or it finalizes itself.
        """
        with self.events.reporting():
            if not is_required or self.current is None or not self.current.all_launched:
                raise cannot_finalize(is_required=is_required, is_incomplete=self.current is not None)
            self._finalize(self.current)

    def _finalize(self, current: BackwardPass) -> None:
        self._enter(Phase.FINALIZING)
        observes_order = self.awaits_order
        try:
            current.wait_and_unpack()
        except BaseException:
            self.on_failure()
            self.unfinished.guard(self)
            raise
        if observes_order:
            self.store.observe(current.observed_order())
        self._enter(Phase.IDLE)
        self.unfinished.settled(self.transport)
        self.backward_end.wait_for_futures()
        self.events.emit(EventKind.BACKWARD_END)

    def on_failure(self) -> None:
        """An exception has ended the backward: note which gradients it leaves behind."""
        if self.current is not None:
            self.current.grads_left = {p: TensorWeakRef(p.grad) for p in self.params if p.grad is not None}

    # ------------------------------------------------------------------ changed after construction

    def change_ranks(self, transport: Transport, reducing: Reducing) -> None:
        """Go on with other ranks, however the last backward has ended. The buckets are rebuilt anew."""
        self.transport, self.reducing = transport, reducing
        if self.current is not None:
            self.current.drop()
        self.store.release()  # the old ranks may yet write into what is on its way
        self.store.make_buckets(transport.allocate)
        self.backward_end.reset()
        self.store.await_another_order()
        self.expectation.reset()
        self._set_phase(Phase.IDLE)

    def expect(self, expectation: Expectation) -> None:
        """Expect other gradients; before the first backward. Its order is trusted for the rebuild."""
        self.expectation = expectation
        self.store.rebuilds = True
        self._bind_hooks()

    def adopt(self, plan: BucketPlan) -> None:
        """Bucket by another plan of the same parameters from the next backward on. Every rank, between steps.

        Raises:
            RuntimeError: a backward is under way.
        """
        if self.phase not in (Phase.IDLE, Phase.ARMED):
            raise RuntimeError(f"minddp: no new buckets while the reducer is in phase {self.phase.name}.")
        self.store.adopt(plan, self.transport.allocate)
        self.events.emit(EventKind.BUCKETS_REBUILT, len(plan.buckets))

    @property
    def awaits_order(self) -> bool:
        """True if buckets are rebuilt after this backward. Ranks agree, also one that has shadowed the first."""
        return self.store.awaits_order and not self.expectation.order_is_provisional

    def _enter(self, phase: Phase) -> None:
        if phase not in ALLOWED[self.phase]:
            raise RuntimeError(f"minddp: a reducer in phase {self.phase.name} cannot become {phase.name}.")
        self._set_phase(phase)

    def _set_phase(self, phase: Phase) -> None:
        if phase is Phase.IDLE:
            self.current = None
        self.phase = phase
        if phase in WITH_GUARD:
            self.unfinished.guard(self)
        else:
            self.unfinished.lift_guard()
        self._bind_hooks()
