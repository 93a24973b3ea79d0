"""The backward pass, from hook to `.grad`: hooks count, buckets are launched in plan order, the end waits for them.

    forward             backward          hooks                  end of backward
    arm(): a pass  ->   opens it     ->   count, pack,      ->   wait in order, unpack,
    is made                               launch                 drop the pass

- What triggers a launch? The last hook of the pack group that fills last in a bucket, once all buckets before it in
  the plan are launched: `BackwardPass._launch_ready_buckets`.
- Where is the mean taken? While a group is packed, `PackGroup.pack`, unless the `Reducing` divides later or not at
  all. See [Note: the mean is taken first].
- What waits, and when? The end of backward, for one bucket after the other: `BackwardPass.wait_and_unpack`.
- What does an exception leave behind? A pass, which the next forward drops: `ensure_finished`.
- What survives a step? The table in `core/__init__.py`.

Three parts are pluggable: an `Expectation` (which gradients will come), a `Reducing` (what reduces a bucket) and
`MakeBucket` (what a bucket is). `Mode`s are called at the points that `Mode` lists.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from minddp.core import autograd
from minddp.core.backward_end import Entry
from minddp.core.backward_pass import ALLOWED, BackwardPass, Phase
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
        self.current: BackwardPass | None = None
        self.num_passes = 0
        self.futures: list[Any] = []  # have a method `wait`, called before a backward returns that is reduced
        self._num_forwards = 0
        self._last_reduced = 0  # number of the forward whose backward was the last to be reduced
        self._further_backward = -1  # one that came in at another output of that forward
        self._slow_hook = autograd.weakly(self._on_hook)
        hooks.on_error = autograd.weakly(self.events.report)
        self._bind_hooks()
        unfinished.watch(self)
        # The module may outlive its wrapper and be wrapped again: old hooks must not fire beside new ones.
        weakref.finalize(self, hooks.remove).atexit = False

    @property
    def phase(self) -> Phase:
        return Phase.IDLE if self.current is None else self.current.phase

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
        is_first = self.num_passes == 0 and self.current is None
        self._make_pass(finalizes_at_end=finalize_at_end)
        for mode in self.modes:
            mode.armed()
        self.expectation.armed(output, is_first=is_first)
        # In the recorded backward, callbacks that hooks of the output queue for the end read averages, as in torch.
        self.watch(output, before_other_hooks=self.expectation.is_recording)

    def _make_pass(self, *, finalizes_at_end: bool) -> None:
        if Phase.ARMED not in ALLOWED[self.phase]:
            raise RuntimeError(f"minddp: a reducer in phase {self.phase.name} cannot become ARMED.")
        parts = (self.store, self.expectation, self.modes, self.events)
        calls = (self._on_all_launched, self._on_ready_twice, self._on_backward_end)
        self.current = BackwardPass(*parts, *calls, finalizes_at_end=finalizes_at_end)
        self._bind_hooks()

    def watch(self, output: Any, *, before_other_hooks: bool = False) -> None:
        """Notice when a backward comes in at `output`. The pass is that of the forward which has returned it."""
        assert self.current is not None, "a pass has been made"
        self._num_forwards += 1
        self.current.ends.is_visible = autograd.call_when_gradient_enters(
            output, self._on_gradient_enters, self._num_forwards, before_other_hooks=before_other_hooks
        )

    def ensure_finished(self) -> None:
        """Raise if an earlier backward left gradients unreduced; drop one that an exception cut short.

        Raises:
            RuntimeError: see [Note: unfinished reduction] and [Note: a backward that is dropped].
        """
        current = self.current
        if current is None or current.phase is Phase.ARMED:
            pass
        elif current.phase is Phase.FINISHED:
            self._enter(Phase.IDLE)
        elif current.phase in (Phase.ACCUMULATING, Phase.REDUCING) and current.ends.is_awaited_here:
            raise still_running()
        elif current.is_unfinished:
            raise self.unfinished.error(self)
        else:
            self.unfinished.agree_to_drop(self.transport, self.num_passes, len(current.reductions))
            current.abandon()
            self.wait_for_futures()  # of its buffer hook: this forward may read what they write
            self._enter(Phase.IDLE)
        if current is not None:
            current.ends.reset()
        self.expectation.forward_begins()

    def rebuild_if_due(self) -> bool:
        """Bucket by the order that the first backward has shown. Collective; true once. See [Note: two plans]."""
        return self.store.rebuild_if_due(self.transport, self.events)

    # ------------------------------------------------------------------ hooks

    def _bind_hooks(self) -> None:
        """See [Note: the hook is bound]."""
        handler, current = self._slow_hook, self.current
        if current is not None and current.phase is Phase.ACCUMULATING and not self.expectation.is_recording:
            handler = current.mark_ready
        opens_pass = self.phase is Phase.ARMED  # which binds anew before the first gradient is counted
        self.hooks.handler = handler if opens_pass else self.expectation.wrap_hook(handler)

    def _on_hook(self, param: int) -> None:
        """The gradient of `param` has been accumulated, and counting it is not all there is to do."""
        current = self.current
        if current is None:  # no_sync, a second backward through one graph, or through an earlier forward
            if self.expectation.is_static and autograd.current_backward() == self._further_backward:
                raise second_backward(self.plan.params[param].name)
            self.events.emit(EventKind.GRADIENT_KEPT, param)
        elif current.phase is Phase.ARMED:
            self._open_pass(current, param)
            self.hooks.handler(param)
        elif current.phase is Phase.ACCUMULATING:
            self._await_end()  # also of the outer backward, if the first hook was in a nested one
            self.expectation.record(param)
        elif current.phase is Phase.INCOMPLETE and current.is_refused:
            self.events.emit(EventKind.GRADIENT_KEPT, param)  # to the end, or cleared gradients would come back
        elif current.phase is Phase.INCOMPLETE:  # a further backward brings more
            self._enter(Phase.ACCUMULATING)
            self._await_end()
            self.hooks.handler(param)
        else:  # all buckets are under way, or have been finalized in a backward that was nested in this one
            self._on_ready_twice(param)

    def _open_pass(self, current: BackwardPass, param: int) -> None:
        """The first hook of an armed backward, that of `param`."""
        self.store.begin_pass()
        current.open(param, self.reducing)
        self.num_passes += 1
        self._enter(Phase.ACCUMULATING)
        self._await_end()
        unused = self.expectation.last_unused or []
        self._check_conversions(unused)
        current.mark_without_hook(unused)

    def _check_conversions(self, params: Iterable[int]) -> None:
        self.hooks.check(params, lambda param: self.plan.params[param].name)

    def _on_all_launched(self) -> None:
        self._await_end()
        self._enter(Phase.REDUCING)
        self.expectation.all_launched(self.transport)

    def _on_ready_twice(self, param: int) -> None:
        static = self.expectation.is_static
        if static and self.phase in (Phase.ACCUMULATING, Phase.REDUCING):
            self._enter(Phase.INCOMPLETE)  # what was recorded is wrong: the next forward will say so too
        raise ready_twice(param, self.plan.params[param].name, static_graph=static)

    # ------------------------------------------------------------------ the end of backward

    def _on_gradient_enters(self, forward: int, at_new_tensor: bool) -> None:
        """A backward comes in at the outputs: the one that the user called, not one nested in it."""
        if at_new_tensor and forward == self._last_reduced:  # the rest of that forward's outputs
            self._further_backward = autograd.current_backward()
            if self.current is None and self.expectation.ends_with_each_backward:
                self._check_that_modes_can_add()
                self._make_pass(finalizes_at_end=True)
        if self.current is None:
            return
        ends = self.current.ends
        ends.enter()
        if self.phase is Phase.ARMED and not ends.is_awaited_here:
            for mode in self.modes:
                mode.backward_begins()
            self.expectation.backward_begins()
        self._await_end()
        if ends.is_awaited_here:
            self._last_reduced = forward

    def _check_that_modes_can_add(self) -> None:
        reasons = [mode.cannot_add for mode in self.modes if mode.cannot_add]
        if reasons and any(param.grad is not None for param in self.params):
            raise RuntimeError(f"`.grad` holds the result of another backward of this forward: {reasons[0]}.")

    def _await_end(self) -> None:
        """Be called at the end of the backward that is running. See [Note: which backward ends]."""
        current = self.current
        if current is not None and current.phase is not Phase.FINISHED and current.ends.await_end():
            self.events.emit(EventKind.BACKWARD_BEGIN)
            if current.phase is Phase.INCOMPLETE:
                self._enter(Phase.ACCUMULATING)

    def _on_backward_end(self, current: BackwardPass, backward: int) -> None:
        """A backward has ended that was to bring gradients of this pass."""
        if current is not self.current:
            return
        is_last = not current.ends.is_any_awaited(but=backward)
        with self.events.reporting():
            if current.phase is Phase.ARMED:  # it has reached no parameter
                self.expectation.backward_was_empty()
                self._check_conversions([0])
            elif current.phase is Phase.ACCUMULATING:
                entry = current.ends.entry_of(backward)
                if self.expectation.is_recording and entry is Entry.AT_OUTPUTS:
                    self.events.emit(EventKind.GRADIENTS_COMPLETE)
                    self.reduce_recorded(backward)
                elif entry is not Entry.NESTED:  # else the outer backward brings more
                    self._enter(Phase.INCOMPLETE)
                    if not self.expectation.is_recording:
                        self.unfinished.warn(current.missing(), self.transport.rank)
            elif current.phase is Phase.REDUCING and (current.finalizes_at_end or is_last):
                self.events.emit(EventKind.GRADIENTS_COMPLETE)
                if current.finalizes_at_end:
                    self._finalize(current, backward)
            elif current.phase is Phase.FINISHED and is_last:
                self._enter(Phase.IDLE)

    def reduce_recorded(self, ending: int = -1) -> None:
        """Backward has only recorded what it brings (the first one of a static graph): reduce it all at once."""
        current = self.current
        if current is None or current.phase is Phase.ARMED or not self.expectation.is_recording:
            return
        self.expectation.recorded()
        self._check_conversions(self.expectation.last_unused or ())
        current.mark_without_hook(range(len(self.params)))
        if current.finalizes_at_end:
            self._finalize(current, ending)

    def finish(self, *, is_required: bool = True) -> None:
        """Finalize a backward that was not to do so by itself: after it, or in it once all buckets are under way.

        Raises:
            RuntimeError: some gradients have not arrived, there is no such backward, or it finalizes itself.
        """
        with self.events.reporting():
            current = self.current
            if not is_required or current is None or current.phase is not Phase.REDUCING:
                is_open = current is not None and current.phase not in (Phase.ARMED, Phase.FINISHED)
                raise cannot_finalize(is_required=is_required, is_incomplete=is_open)
            self._finalize(current)

    def _finalize(self, current: BackwardPass, ending: int = -1) -> None:
        """Put the averages into the gradients. `ending` is the backward that has just ended, if one has."""
        self._enter(Phase.FINALIZING)
        observes_order = self.awaits_order
        try:
            current.wait_and_unpack()
        except BaseException:
            current.note_failure()
            raise
        if observes_order:
            self.store.observe(current.observed_order())
        self._enter(Phase.FINISHED if current.ends.is_any_awaited(but=ending) else Phase.IDLE)
        self.unfinished.settled(self.transport)
        self.wait_for_futures()
        self.events.emit(EventKind.BACKWARD_END)

    def wait_for_futures(self) -> None:
        futures, self.futures = self.futures, []
        for future in futures:
            future.wait()

    # ------------------------------------------------------------------ changed after construction

    def change_ranks(self, transport: Transport, reducing: Reducing) -> None:
        """Go on with other ranks, however the last backward has ended. The buckets are rebuilt anew."""
        self.transport, self.reducing = transport, reducing
        if self.current is not None and self.current.phase not in (Phase.ARMED, Phase.FINISHED):
            self.current.drop()
        self.current = None
        self.store.release()  # the old ranks may yet write into what is on its way
        self.store.make_buckets(transport.allocate)
        self.store.await_another_order()
        self.expectation.reset()
        self._bind_hooks()

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
        current = self.current
        if current is None or phase not in ALLOWED[current.phase]:
            raise RuntimeError(f"minddp: a reducer in phase {self.phase.name} cannot become {phase.name}.")
        if phase is Phase.IDLE:
            self.current = None
        current.phase = phase
        self._bind_hooks()
