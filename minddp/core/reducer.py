"""From a parameter's hook to its `.grad`: hooks count, buckets are launched in plan order, the end waits for them.

    forward returns              gradients arrive            all gradients have arrived
    prepare_for_backward():  ->  hooks: count, pack,    ->   _finalize(): wait in order, unpack,
    make a pass                  launch                      drop the pass

- A bucket is launched when its last pack group is complete and all buckets before it in the plan are launched:
  `BackwardPass._launch_ready_buckets`.
- Each rank divides its gradients by the number of ranks while a group is packed, `PackGroup.pack`, unless the
  `ReduceStrategy` divides later or not at all. See [Note: the mean is taken first].
- The end of backward waits, first for the marks of used parameters if there are any, then for one bucket after the
  other: `BackwardPass.wait_and_unpack`.
- After an exception in backward, an optimizer step on its gradients raises (`unfinished.py`), and the next forward
  drops the pass (`ensure_finished`). The table in `core/__init__.py` lists all that survives a step.

Three parts are pluggable: a `UsageTracker` (which gradients will come), a `ReduceStrategy` (how a bucket is
reduced) and `MakeBucket` (dense or sparse buckets). `Mode`s are called at the points that `Mode` lists.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from minddp.core import autograd
from minddp.core.backward_end import Entry
from minddp.core.backward_pass import ALLOWED, BackwardPass, Phase
from minddp.core.bucket_store import BucketStore
from minddp.core.errors import cannot_finalize, ready_twice, second_backward, still_running
from minddp.core.events import EventKind, EventStream
from minddp.core.mode import Mode
from minddp.core.plan import BucketPlan
from minddp.core.reduction import ReduceStrategy
from minddp.core.unfinished import UnfinishedReduction
from minddp.core.usage_tracker import UsageTracker
from minddp.transport.protocols import Transport


class Reducer:
    """Averages the gradients of `hooks.params` over the ranks of `transport` in every synchronised backward."""

    def __init__(
        self,
        hooks: autograd.GradientHooks,
        transport: Transport,
        store: BucketStore,
        usage_tracker: UsageTracker,
        reduce_strategy: ReduceStrategy,
        unfinished: UnfinishedReduction,
        modes: Sequence[Mode] = (),
    ):
        # The parts.
        self.hooks = hooks
        self.params = hooks.params
        self.transport = transport
        self.store = store
        self.usage_tracker = usage_tracker
        self.reduce_strategy = reduce_strategy
        self.modes = list(modes)  # called in this order
        self.unfinished = unfinished
        self.events = EventStream()

        # The current backward, and what survives it.
        self.current: BackwardPass | None = None
        self.num_passes = 0  # synchronised backwards so far, without those dropped before a bucket was launched
        self.finalizes_at_end = True  # if not, the caller of backward calls `finish`. Set it in phase IDLE
        self.futures: list[Any] = []  # the end of the next synchronised backward calls their `wait`
        self._last_entered: set[int] | None = None  # of the last reduced forward: outputs not reached
        self._further_backward = -1  # a backward that entered at another output of that forward
        self._entered_backward = -1  # the latest that entered at outputs; another wrapper may share the parameters
        self._expects_average = False  # the latest forward was synchronised, and no local gradient was warned of

        # Weakly, since the engine keeps hooks and callbacks, and with them a pass.
        self._weak_on_hook = autograd.weakly(self._on_hook)
        self._calls_of_pass = tuple(
            map(autograd.weakly, (self._on_all_launched, self._on_ready_twice, self._on_backward_end))
        )
        hooks.on_error = autograd.weakly(self.events.report)
        self._bind_hooks()
        unfinished.watch(self)
        # The module may outlive its wrapper and be wrapped again: old hooks must not fire beside new ones.
        weakref.finalize(self, hooks.remove).atexit = False

    @property
    def phase(self) -> Phase:
        return Phase.IDLE if self.current is None else self.current.phase

    # ------------------------------------------------------------------ called around forward

    def prepare_for_backward(self, output: Any) -> None:
        """A forward has returned `output`, and its backward will be synchronised."""
        if not self.params:  # all of them are delayed
            return
        self._expects_average = True
        is_first = self.num_passes == 0 and self.current is None
        self._make_pass()
        for mode in self.modes:
            mode.post_forward()
        self.usage_tracker.post_forward(output, is_first=is_first)
        # In the recorded backward, callbacks that hooks of the output queue for the end read averages, as in torch.
        self._hook_outputs(output, before_other_hooks=self.usage_tracker.is_recording)

    def skip_sync(self, output: Any) -> None:
        """A forward has returned `output`, and its backward will only accumulate gradients locally."""
        self.events.emit(EventKind.NO_SYNC)
        self._expects_average = False
        if self.phase is Phase.PREPARED and self.usage_tracker.is_recording:
            # As in torch, its backward takes the place of the one that an earlier forward lacks.
            self._hook_outputs(output)
            self.unfinished.warn_of_early(self.transport.rank)

    def _make_pass(self, *, is_further: bool = False) -> None:
        if Phase.PREPARED not in ALLOWED[self.phase]:
            raise RuntimeError(f"minddp: a reducer in phase {self.phase.name} cannot become PREPARED.")
        parts = (self.store, self.usage_tracker, self.modes, self.events)
        finalizes_at_end = self.finalizes_at_end or is_further
        self.current = BackwardPass(
            *parts, *self._calls_of_pass, finalizes_at_end=finalizes_at_end, is_further=is_further
        )
        self._bind_hooks()

    def _hook_outputs(self, output: Any, *, before_other_hooks: bool = False) -> None:
        """Notice when a backward enters at `output`, the result of the latest forward.

        The set of its tensors that no backward has reached stands for the forward. `autograd.grad` of an output
        enters there, too. It reaches no parameter, so the pass stays PREPARED for the backward that follows, and
        the output counts as not reached.
        """
        assert self.current is not None, "a pass has been made"
        unreached = autograd.call_when_gradient_enters(
            output, self._on_gradient_enters, before_other_hooks=before_other_hooks
        )
        self.current.ends.is_visible = bool(unreached)

    def ensure_finished(self) -> None:
        """Drop a backward that an exception has interrupted. Raise if one has left gradients unreduced.

        Raises:
            RuntimeError: see [Note: unfinished reduction]; or another rank does not drop the same backward.
        """
        current = self.current
        if current is None:
            pass
        elif current.phase is Phase.PREPARED and not current.has_raised:
            current.ends.reset()
        elif current.phase is Phase.FINISHED:
            self._enter(Phase.IDLE)
        elif current.is_unfinished:
            raise self.unfinished.error(self)
        elif not current.has_raised:
            raise still_running()
        else:
            is_counted = current.phase is not Phase.PREPARED  # it has reached a parameter
            number, num_launched = self.num_passes + (not is_counted), len(current.reductions)
            self.unfinished.agree_to_drop(self.transport, number, num_launched)
            current.abandon()
            self.wait_for_futures()  # of its buffer hook: the next forward may read the buffers
            self._enter(Phase.IDLE)
            if is_counted and not num_launched:
                self.num_passes -= 1  # the next one takes its place
        self.usage_tracker.forward_begins()

    def rebuild_if_due(self) -> bool:
        """Rebuild the buckets in the order that the first backward has shown. Collective; returns True once."""
        return self.store.rebuild_if_due(self.transport, self.events)

    # ------------------------------------------------------------------ hooks

    def _bind_hooks(self) -> None:
        """See [Note: the hook is bound]."""
        current = self.current
        handler: Callable[[int], object] = self._weak_on_hook
        if current is not None and current.phase is Phase.ACCUMULATING and not self.usage_tracker.is_recording:
            handler = current.mark_ready
        opens_pass = self.phase is Phase.PREPARED  # the first hook changes the phase, and so binds again
        self.hooks.handler = handler if opens_pass else self.usage_tracker.wrap_hook(handler)

    def _on_hook(self, param: int) -> None:
        """The gradient of `param` has been accumulated outside of the fast path of `BackwardPass.mark_ready`."""
        current = self.current
        if current is None:  # no_sync, a second backward through one graph, or through an earlier forward
            if self.usage_tracker.is_static and autograd.current_backward() == self._further_backward:
                raise second_backward(self.store.plan.params[param].name)
            if self.usage_tracker.stays_local(param):
                self.unfinished.warn_of_static(param, self.transport.rank)
            if self._expects_average and autograd.current_backward() == self._entered_backward:
                self._expects_average = False
                self.unfinished.warn_of_local(param, self.transport.rank)
            self.events.emit(EventKind.GRADIENT_KEPT, param)
        elif current.phase is Phase.PREPARED:
            self._begin_pass(current, param)
            self.hooks.handler(param)
        elif current.phase is Phase.ACCUMULATING:
            self._queue_end_callback()  # of the outer backward, too, if the first hook fired in a nested one
            self.usage_tracker.record(param)
        elif current.phase is Phase.INCOMPLETE and current.is_refused:
            # An error was raised. A reduction now would bring back gradients that the script has cleared.
            self.events.emit(EventKind.GRADIENT_KEPT, param)
        elif current.phase is Phase.INCOMPLETE:  # a further backward brings more gradients
            self._enter(Phase.ACCUMULATING)
            self._queue_end_callback()
            self.hooks.handler(param)
        else:  # all buckets have been launched, or a nested backward has finalized them
            self._on_ready_twice(param)

    def _begin_pass(self, current: BackwardPass, param: int) -> None:
        """The first hook of a prepared backward, that of `param`."""
        if not self._expects_average and current.ends.is_visible and current.ends.main is None:
            self.unfinished.warn_of_early(self.transport.rank)
        self.store.begin_pass()
        current.begin(param, self.reduce_strategy)
        self.num_passes += 1
        self._enter(Phase.ACCUMULATING)
        self._queue_end_callback()
        unused = self.usage_tracker.last_unused or []
        self.hooks.check_conversions(unused)
        current.mark_without_hook(unused)

    def _on_all_launched(self) -> None:
        self._queue_end_callback()
        self._enter(Phase.REDUCING)
        is_further = self.current is not None and self.current.is_further
        leaves_outputs = bool(self._last_entered)
        self.usage_tracker.all_launched(self.transport, leaves_outputs=leaves_outputs, is_further=is_further)

    def _on_ready_twice(self, param: int) -> None:
        static = self.usage_tracker.is_static
        if static and self.phase in (Phase.ACCUMULATING, Phase.REDUCING):
            self._enter(Phase.INCOMPLETE)  # the recorded graph has changed: the next forward raises, too
        raise ready_twice(param, self.store.plan.params[param].name, static_graph=static)

    # ------------------------------------------------------------------ the end of backward

    def _on_gradient_enters(self, forward: set[int], new_place: int | None) -> None:
        """A backward, the one that the user called, enters at the outputs of `forward`, see `_hook_outputs`."""
        self._entered_backward = autograd.current_backward()
        if forward is self._last_entered:  # a further backward, perhaps at another output
            if new_place is not None:
                self._further_backward = autograd.current_backward()
            if self.current is None and self.usage_tracker.awaits_further_backward():
                reason = next((mode.why_not_twice for mode in self.modes if mode.why_not_twice), "")
                if reason and any(param.grad is not None for param in self.params):
                    raise RuntimeError(f"`.grad` holds the result of another backward of this forward: {reason}.")
                self._make_pass(is_further=True)
        if self.current is None:
            return
        if new_place is not None:
            self.current.entered.append((forward, new_place))
        if self._queue_end_callback(at_outputs=True) and self.phase is Phase.PREPARED:
            for mode in self.modes:
                mode.backward_begins()
            self.usage_tracker.backward_begins()
        if self.current.ends.is_running_in_this_thread:
            self._last_entered = forward

    def _queue_end_callback(self, *, at_outputs: bool = False) -> bool:
        """Request a call at the end of the running backward. Returns True if it is a new one.

        See [Note: which backward ends].
        """
        current = self.current
        if current is None or current.phase is Phase.FINISHED:
            return False
        if not current.ends.queue_end_callback(at_outputs=at_outputs):
            return False
        self.events.emit(EventKind.BACKWARD_BEGIN)
        if current.phase is Phase.INCOMPLETE:
            self._enter(Phase.ACCUMULATING)
        return True

    def _on_backward_end(self, current: BackwardPass, backward: int) -> None:
        """A backward that belongs to the pass `current` has ended."""
        if current is not self.current:
            return
        is_last = not current.ends.is_any_awaited(but=backward)
        with self.events.reporting():
            if current.phase is Phase.PREPARED:  # it reached no parameter
                current.note_empty()
                self.usage_tracker.backward_was_empty()
                self.hooks.check_conversions(range(len(self.params)))
                if current.is_further:  # no forward awaits one
                    self._enter(Phase.IDLE)
            elif current.phase is Phase.ACCUMULATING:
                entry = current.ends.entry_of(backward)
                if self.usage_tracker.is_recording and entry is Entry.AT_OUTPUTS:
                    self.events.emit(EventKind.GRADIENTS_COMPLETE)
                    self.reduce_recorded(backward)
                elif entry is not Entry.NESTED:  # else the outer backward brings more gradients
                    self._enter(Phase.INCOMPLETE)
                    if not self.usage_tracker.is_recording:
                        self.unfinished.warn(current.missing(), self.transport.rank)
            elif current.phase is Phase.REDUCING and (current.finalizes_at_end or is_last):
                self.events.emit(EventKind.GRADIENTS_COMPLETE)
                if current.finalizes_at_end:
                    self._finalize(current, backward)
            elif current.phase is Phase.FINISHED and is_last:
                self._enter(Phase.IDLE)

    def reduce_recorded(self, ending: int = -1) -> None:
        """The first backward of a static graph, which only counts its gradients, has ended: reduce them all."""
        current = self.current
        if current is None or current.phase is Phase.PREPARED or not self.usage_tracker.is_recording:
            return
        self.usage_tracker.recorded()
        self.hooks.check_conversions(self.usage_tracker.last_unused or ())
        current.mark_without_hook(range(len(self.params)))
        if current.finalizes_at_end:
            self._finalize(current, ending)

    def finish(self) -> None:
        """Finalize a backward that does not finalize itself: after it, or in it once all buckets are launched.

        Raises:
            RuntimeError: some gradients have not arrived, there is no such backward, or it finalizes itself.
        """
        with self.events.reporting():
            current = self.current
            if self.finalizes_at_end or current is None or current.phase is not Phase.REDUCING:
                is_open = current is not None and current.phase not in (Phase.PREPARED, Phase.FINISHED)
                raise cannot_finalize(is_required=not self.finalizes_at_end, is_incomplete=is_open)
            self._finalize(current)

    def _finalize(self, current: BackwardPass, ending: int = -1) -> None:
        """Put the averages into the gradients. `ending` is the backward that has just ended, if any."""
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

    def change_ranks(self, transport: Transport, reduce_strategy: ReduceStrategy) -> None:
        """Continue with other ranks, even after an interrupted backward. The buckets will be rebuilt again."""
        self.transport, self.reduce_strategy = transport, reduce_strategy
        if self.current is not None and self.current.phase not in (Phase.PREPARED, Phase.FINISHED):
            self.current.drop()
        self.current = None
        self.store.release()  # the old ranks may still write into buckets in flight
        self.store.make_buckets(transport.allocate)
        self.store.await_another_order()
        self.usage_tracker.reset()
        self._bind_hooks()

    def expect(self, usage_tracker: UsageTracker) -> None:
        """Replace the usage tracker between backwards, for example when the graph becomes static."""
        self.usage_tracker = usage_tracker
        self.store.rebuilds |= usage_tracker.is_static
        self._bind_hooks()

    def adopt(self, plan: BucketPlan) -> None:
        """Use another plan of the same parameters from the next backward on. On every rank, between steps."""
        if self.phase not in (Phase.IDLE, Phase.PREPARED):
            raise RuntimeError(f"minddp: no new buckets while the reducer is in phase {self.phase.name}.")
        self.store.adopt(plan, self.transport.allocate)
        self.events.emit(EventKind.BUCKETS_REBUILT, len(plan.buckets))

    @property
    def awaits_order(self) -> bool:
        """True if the buckets are rebuilt after the next backward. Equal on all ranks, also on a joined one."""
        return self.store.will_rebuild and not self.usage_tracker.order_is_provisional

    def _enter(self, phase: Phase) -> None:
        current = self.current
        if current is None or phase not in ALLOWED[current.phase]:
            raise RuntimeError(f"minddp: a reducer in phase {self.phase.name} cannot become {phase.name}.")
        if phase is Phase.IDLE:
            self.current = None
        current.phase = phase
        self._bind_hooks()
