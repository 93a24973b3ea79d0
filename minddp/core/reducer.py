"""The backward pass as a state machine: hooks count, buckets leave in plan order, the end waits for them.

    forward        backward begins          hooks              end of backward
    arm()     ->   first hook: a pass   ->  count, pack,   ->  wait in order, unpack,
                   is opened                launch             drop the pass

All that one backward has to remember is in a `BackwardPass`, made at the first hook and dropped at the end.
Nothing is reset by hand, so nothing is left half reset by an exception: a pass that an exception interrupted is
simply dropped, and the next step starts with a new one.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from minddp.comm_hooks import CommHook, GradBucket
from minddp.core import autograd
from minddp.core.backward_pass import ALLOWED, AllReduce, BackwardPass, HookedReduction, Phase, Reduction
from minddp.core.bucket import Bucket, GradDtypes
from minddp.core.bucket_store import Bucketing
from minddp.core.divisor import Divisor
from minddp.core.events import Event, EventKind, EventSink, fan_out
from minddp.core.missing_gradients import (
    Missing,
    OptimizerGuard,
    exchange_missing,
    not_yet_finished,
    ready_twice,
    unfinished_reduction,
)
from minddp.core.options import Options
from minddp.core.packing import Scaling
from minddp.core.plan import BucketPlan, ParamSpec
from minddp.core.readiness import Countdown
from minddp.core.speakers import Speakers
from minddp.expectation.find_unused import Reach
from minddp.expectation.usage_map import UsageMap
from minddp.modes.mixed_precision import MixedPrecision
from minddp.modes.optimizer_overlap import OverlappedOptimizer
from minddp.modes.rpc import LentGradients, context_of_forward
from minddp.modes.sparse import SparseBucket
from minddp.transport.protocols import Transport
from minddp.watchdog import Progress, WatchedTransport

_log = logging.getLogger(__name__)


class Reducer:
    """Averages the gradients of `params` over the ranks of `transport` in every armed backward.

    `plan` and `buckets` change once, when the order of the first backward is known. The gradients of parameters
    in `sparse_names` are sparse tensors. `at_end` are futures that the next backward also waits for, `optimizers`
    step each bucket's parameters as soon as it is reduced. `last_unused` are the parameters that this rank did not
    use in the last backward that was reduced; `None` before the first.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, torch.nn.Parameter]],
        transport: Transport,
        options: Options,
        sparse_names: Collection[str] = (),
        mixed_precision: MixedPrecision | None = None,
    ):
        self.names = [name for name, _ in named_params]
        self.params = [param for _, param in named_params]
        self.transport = transport
        self.options = options
        self.comm_hook: CommHook | None = None
        self._sinks: tuple[EventSink, ...] = ()
        self._sink: EventSink | None = None
        self.divisor = Divisor(transport, options.reduction)
        self.at_end: list[torch.futures.Future] = []
        self.optimizers: list[OverlappedOptimizer] = []
        self.last_unused: Sequence[int] | None = None
        self.phase = Phase.IDLE
        self._finalizes_at_end = True
        self._sparse_names = frozenset(sparse_names)
        self._mixed_precision = mixed_precision
        self._rpc_context: int | None = None
        self._forward_was_nested = False
        self._pass: BackwardPass | None = None
        self._awaited_backwards: set[int] = set()
        self._num_passes = 0
        self._serial = self._serial_number()
        self._guard: OptimizerGuard | None = None
        self._warned_of: set[tuple[int, ...]] = set()
        self._unused_anywhere: Sequence[bool] | None = None
        self._hooks_expected: list[int]
        self._recorded_hooks: list[int] | None
        self._usage: UsageMap | None
        self._begin_tracking()
        self._countdown = Countdown(self)
        self.bucketing = Bucketing(
            self.params,
            self._specs(),
            options,
            grads_are_views=self._grads_are_views,
            dtypes=self._mixed_precision.grad_dtypes if self._mixed_precision else GradDtypes(),
        )
        self._countdown.regroup(self.bucketing.members)
        if not options.lazy_bucket_allocation:
            self.bucketing.make_buckets(transport.allocate)
        self._hooks = autograd.Hooks(self.params, self._countdown.on_grad_accumulated)
        self._speakers = Speakers(self._hooks, self.params)
        self._reach = Reach(self._hooks)
        # The module may outlive its wrapper and be wrapped again: old hooks must not fire beside new ones.
        weakref.finalize(self, self._hooks.remove).atexit = False
        weakref.finalize(self, self._speakers.fall_silent).atexit = False

    # ------------------------------------------------------------------ called around forward

    def renew_hooks(self) -> None:
        """The parameters' dtype has changed."""
        self._hooks.renew()

    def arm(self, output: Any, *, finalize_at_end: bool = True) -> None:
        """A forward that wants its backward synchronised has returned `output`.

        Unless `finalize_at_end`, whoever calls backward calls `finish` as well.
        """
        if not self.params:  # all of them are delayed
            return
        is_first_forward = self._num_passes == 0 and self.phase is Phase.IDLE
        self._move_to(Phase.ARMED)
        self._finalizes_at_end = finalize_at_end
        self._rpc_context = context_of_forward()
        self._forward_was_nested = autograd.inside_another_backward()
        self._reach.forget()
        if self.options.finds_unused_each_pass:
            if self._rpc_context is not None:
                self._reach.walk_from(output)
            elif is_first_forward:
                self._reach.note_outside_forward(output)
        autograd.call_when_gradient_enters(output, self._on_gradient_enters)

    def keep_local(self) -> None:
        """A forward has returned whose backward will stay local, under `no_sync`."""
        self._hear_each()  # there will be gradients when the next one begins
        self.tell(EventKind.NO_SYNC)

    def ensure_finished(self) -> None:
        """Raise if an earlier backward left gradients unreduced; drop one that an exception cut short.

        Raises:
            RuntimeError: see [Note: unfinished reduction].
        """
        if autograd.current_backward() in self._awaited_backwards and self._may_have_gradients:
            raise self._still_running()
        ended = not self._awaited_backwards  # the end is never reached if an exception cuts a backward short
        if self.phase is Phase.INCOMPLETE or (self.phase is Phase.ACCUMULATING and ended):
            raise self._unfinished()
        if self.phase is Phase.REDUCING:
            raise self._not_finalized()
        if self.phase in (Phase.ACCUMULATING, Phase.FINALIZING):
            self._drop_interrupted_pass()
        self._awaited_backwards.clear()

    @property
    def _may_have_gradients(self) -> bool:
        """Whether the backward that is running may have brought some, announced or not."""
        return self.phase is Phase.ACCUMULATING or (self.phase is Phase.ARMED and self._speakers.speak_now)

    def _still_running(self) -> RuntimeError:
        return RuntimeError(
            "Expected to have finished reduction in the prior iteration before starting a new one: a backward of "
            "this wrapper is still running, and has called its forward, in a hook perhaps. Call the module there, "
            "without its wrapper, or wait until backward has ended."
        )

    def rebuild_if_due(self) -> bool:
        """Bucket by the order that the first backward has shown. Collective; true once. See [Note: two plans]."""
        observed = self.bucketing.take_observed_order()
        if observed is None:
            return False
        self.tell(EventKind.REBUILD_BEGIN)
        self.bucketing.rebuild(self._order_of_rank_0(observed), self.transport.allocate)
        self._regroup()
        self.tell(EventKind.BUCKETS_REBUILT, len(self.buckets))
        return True

    def shadow_backward(self) -> None:
        """Take part, with zeros, in a backward of the other ranks: this one has run out of inputs.

        The same collectives in the same order as in a backward; the results are of no use here. See `join.py`.
        """
        self._num_passes += 1
        awaits_order = self.awaits_order
        self.bucketing.make_buckets(self.transport.allocate)
        under_way = [self._launch(bucket, torch.zeros_like(bucket.wire)) for bucket in self.buckets]
        if self._usage is not None:
            nobody = UsageMap(len(self.params), self.params[0].device)
            nobody.begin_exchange(self.transport, [False] * len(self.params))
            unused_anywhere = nobody.finish_exchange()
            if self.options.static_graph:
                self._unused_anywhere, self._usage = unused_anywhere, None
        for reduction in under_way:
            reduction.result()
        if awaits_order:
            self.bucketing.observe(list(range(len(self.params))))
        self._wait_for_others()

    # ------------------------------------------------------------------ called during backward

    def attend(self, param: int) -> bool:
        """A hook has fired while there is more to do than to count. Whether the gradient is now complete."""
        if self._pass is not None and self._speakers.speak_now:
            self._hear_speaker(param)
            return False
        current = self._pass_of(param)
        if current is None:
            return False
        if self._speakers.in_office:
            self._hear_speaker(param)
            return False
        if self._recorded_hooks is not None:
            self._recorded_hooks[param] += 1
            return False
        current.hooks_left[param] -= 1
        if current.hooks_left[param] > 0:
            return False
        current.ready_order.append(param)
        self.tell(EventKind.PARAM_READY, param)
        self._watch_only_if_needed()
        return True

    def _pass_of(self, param: int) -> BackwardPass | None:
        """What the gradient that has just arrived is part of; the first one of an armed backward opens it.

        `None` under `no_sync`, and in a second backward through one graph: there gradients stay local.
        """
        if self._pass is None and self.phase is not Phase.IDLE:
            self._open_pass(param)
        current = self._pass
        is_lent = current is not None and current.lent is not None
        if self._usage is not None and (is_lent or self.params[param].grad is not None):
            self._usage.mark(param)
        if current is not None:
            if not self._speakers.saw_this_begin():
                self._hear_each()
            self._await_end()
        elif self._awaited_backwards:
            self.on_ready_twice(param)  # a nested backward has completed the pass, yet the outer one brings more
        else:
            self.tell(EventKind.GRADIENT_KEPT, param)
        return current

    def _hear_speaker(self, param: int) -> None:
        """It speaks for its run, if all of that have come. See [Note: one hook per run]."""
        run = self._countdown.run_of[param]
        index, run_in_bucket = self.bucketing.runs[run]
        if self.buckets[index].take(run_in_bucket):
            self._countdown.strike_off_run(run)

    def _hear_each(self) -> None:
        """From now on every parameter speaks for itself."""
        self._speakers.dismiss(for_good=True)
        self._countdown.count_each()

    def _watch_only_if_needed(self) -> None:
        """See [Note: the hot path]. A backward before an election is watched, too: it must not be a nested one."""
        self._countdown.is_watched = not self._only_counts or self._speakers.may_be_elected

    @property
    def _only_counts(self) -> bool:
        """Whether each parameter just has to be counted once: the plan is final, and all are used."""
        plan_is_final = self.has_rebuilt or not self.options.rebuilds_buckets
        return plan_is_final and self._each_fires_once and self._usage is None

    def _open_pass(self, param: int) -> BackwardPass:
        """The first hook of an armed backward, that of `param`."""
        divisor = self.divisor.for_this_backward() if self.comm_hook is None else None
        self._move_to(Phase.ACCUMULATING)
        self._num_passes += 1
        self._countdown.restart(as_a_whole=self._speakers.in_office)
        self.bucketing.make_buckets(self.transport.allocate, adopt_grads=False)
        for bucket in self.buckets:
            bucket.begin_pass()
        divides_sums = self._mixed_precision is not None
        current = self._pass = BackwardPass(
            hooks_left=list(self._hooks_expected),
            runs_left=list(self.bucketing.runs_per_bucket),
            scaling=self._scaling(None if divides_sums else divisor),
            divisor_of_sums=divisor if divides_sums else None,
            lent=self._lent_gradients(param),
            is_spoken_for=self._speakers.in_office,
        )
        makes_all_grads = self._speakers.saw_this_begin()
        current.may_hand_over = makes_all_grads and current.lent is None and self._may_hand_over()
        if self._usage is not None:
            self._usage.begin_pass()
        if self._recorded_hooks is not None:
            return current
        if self.options.finds_unused_each_pass:
            self._find_unused(current)
        else:
            current.unused = [param for param, count in enumerate(self._hooks_expected) if count == 0]
        for param in current.unused:
            self._count_as_ready(param)
        return current

    @property
    def _grads_are_views(self) -> bool:
        return self.options.gradient_as_bucket_view and self._mixed_precision is None

    def _may_hand_over(self) -> bool:
        """Whether gradients may come to lie in the buckets. See [Note: handing gradients over]."""
        creates_graph = torch.is_grad_enabled()  # backward(create_graph=True): gradients stay part of a graph
        is_cast = self._mixed_precision is not None
        leaves_some = self.options.finds_unused_each_pass
        return not (creates_graph or is_cast or self._grads_are_views or leaves_some)

    def _scaling(self, divisor: float | None) -> Scaling:
        batched = self.options.batched_grad_copy
        return Scaling(
            divisor=divisor,
            divide_copied=batched,
            divide_resident=batched or self._grads_are_views,
            by_parts=batched,
        )

    def _lent_gradients(self, param: int) -> LentGradients | None:
        """Where the gradients of this backward are found, if not in `.grad`."""
        if self._rpc_context is None:
            return None
        lent = LentGradients(self._rpc_context, self.params, self.names)
        return lent if lent.has(param) else None

    def _find_unused(self, current: BackwardPass) -> None:
        """Parameters that this backward will not reach count as ready."""
        current.unused = self._reach.left_out()
        for param in current.unused:
            current.hooks_left[param] = 0
        if not current.unused:
            warnings.warn(
                "find_unused_parameters=True was specified in DDP constructor, but did not find any unused "
                "parameters in this backward. If every parameter is always used, leave it out and save the search.",
                stacklevel=2,
            )

    def _count_as_ready(self, param: int) -> None:
        """A parameter that no hook will announce."""
        self.tell(EventKind.PARAM_READY, param)
        self._countdown.strike_off(param)

    def on_ready_twice(self, param: int) -> None:
        if self.options.static_graph:
            self._move_to(Phase.INCOMPLETE)  # what was recorded is wrong: the next forward will say so too
        raise ready_twice(param, self.names[param], static_graph=self.options.static_graph)

    def note_error(self, error: Exception) -> None:
        """A hook fails. For who keeps a log."""

    def on_run_ready(self, run: int) -> None:
        """All gradients of a run are there. See [Note: packing in runs]."""
        assert self._pass is not None
        current = self._pass
        index, run_in_bucket = self.bucketing.runs[run]
        bucket = self.buckets[index]
        if current.lent is not None:
            current.lent.lend(self.bucketing.members[run])
        self.tell(EventKind.PACK_BEGIN, index)
        if torch.is_grad_enabled():  # as good as never: in backward(create_graph=True)
            with torch.no_grad():
                bucket.pack(run_in_bucket, current.scaling)
        else:
            bucket.pack(run_in_bucket, current.scaling)
        self.tell(EventKind.PACK_END, index)
        current.runs_left[index] -= 1
        if current.runs_left[index] == 0:
            self.tell(EventKind.BUCKET_READY, index)
            self._launch_ready_buckets(current)

    def _launch_ready_buckets(self, current: BackwardPass) -> None:
        """Launch from the head of the plan for as long as buckets are full. See [Note: launch order]."""
        while not current.is_complete and current.runs_left[len(current.reductions)] == 0:
            bucket = self.buckets[len(current.reductions)]
            if self._skips(bucket, current):
                current.reductions.append(None)
                continue
            nothing = torch.zeros_like(bucket.wire) if current.counts_for_nothing else None
            current.reductions.append(self._launch(bucket, nothing, divisor=current.divisor_of_sums))
        if current.is_complete:
            self._await_end()
            if self._usage is not None:
                self._usage.begin_exchange(self.transport, [param.grad is not None for param in self.params])

    def _launch(
        self,
        bucket: Bucket | SparseBucket,
        instead: torch.Tensor | None = None,
        *,
        divisor: float | None = None,
    ) -> Reduction:
        """Begin to reduce a bucket, or other contents `instead` of what is in it."""
        index = bucket.spec.index
        self.tell(EventKind.BUCKET_LAUNCHED, index)
        reduction: Reduction
        if self.comm_hook is None:
            wire = bucket.wire if instead is None else instead
            reduction = AllReduce(self.transport.all_reduce(wire), wire, divisor)
        else:
            view = GradBucket(bucket, is_last=bucket is self.buckets[-1], instead=instead)
            future = self.comm_hook.launch(view)
            transport = self.transport
            watched = (
                transport.watch_future(bucket.wire, future) if isinstance(transport, WatchedTransport) else None
            )
            reduction = HookedReduction(self.comm_hook, future, bucket, watched)
            self.tell(EventKind.COMM_HOOK_RETURNED, index)
        if self._sink is not None:  # who begins to watch later has not seen the launch, and hears of no end either
            reduction.when_complete(partial(self._sink, Event(EventKind.BUCKET_COMPLETED, index)))
        return reduction

    def _skips(self, bucket: Bucket | SparseBucket, current: BackwardPass) -> bool:
        """Whether a bucket of nothing but unused parameters stays home (skip_all_reduce_unused_params)."""
        return self.options.skip_all_reduce_unused_params and all(
            slot.param in current.unused for slot in bucket.spec.slots
        )

    # ------------------------------------------------------------------ the end of backward

    def _on_gradient_enters(self) -> None:
        """A backward comes in at the outputs: the one that was called, not one nested in it."""
        is_first_news = self.phase is Phase.ARMED and autograd.current_backward() not in self._awaited_backwards
        may_have_speakers = is_first_news and not self.options.finds_unused_each_pass
        if may_have_speakers and not self._speakers.see_backward_begin():
            self._hear_each()
        self._await_end()
        if self.phase is Phase.ARMED and self.options.finds_unused_each_pass:
            self._reach.ask_engine()

    def _await_end(self) -> None:
        """Be called at the end of the backward that is running.

        A gradient that enters at the outputs asks for it, so that it is the backward that the user called. The
        first hook asks too, in case the outputs hold tensors where nobody found them.
        """
        backward = autograd.current_backward()
        if self.phase is Phase.IDLE or backward in self._awaited_backwards:
            return
        self._awaited_backwards.add(backward)
        self.tell(EventKind.BACKWARD_BEGIN)
        if self.phase is Phase.INCOMPLETE:  # a further backward brings more
            self._move_to(Phase.ACCUMULATING)
        autograd.call_at_end_of_backward(partial(self._on_backward_end, backward))

    def _on_backward_end(self, backward: int) -> None:
        is_nested = autograd.inside_another_backward() and not self._forward_was_nested
        if self._has_missed_hooks and not is_nested:
            self._catch_up()
        self._awaited_backwards.discard(backward)
        self._countdown.is_watched = True
        if self._pass is None or self.phase is Phase.REDUCING:
            self._reach.forget_backward()
            return  # this backward has not reached any parameter, or ends a second time
        if self._pass.is_complete:
            self.tell(EventKind.GRADIENTS_COMPLETE)
            self._end_pass(self._pass)
        elif is_nested:
            return  # a nested one after all; the next hook will ask again
        elif self._recorded_hooks is not None:
            self.tell(EventKind.GRADIENTS_COMPLETE)
            self._reduce_recorded(self._pass, self._recorded_hooks)
        else:
            self._move_to(Phase.INCOMPLETE)
            self._guard = OptimizerGuard(self.params, self._unfinished)
            self._warn_of_unfinished()

    @property
    def _has_missed_hooks(self) -> bool:
        """Whether gradients may have come that no hook has announced: a speaker came too early, or did not."""
        if self._pass is None:
            return self._speakers.in_office and self.phase is Phase.ARMED
        return self._pass.is_spoken_for and not self._pass.is_complete

    def _catch_up(self) -> None:
        """Backward has ended: what it has reached has come. See [Note: one hook per run]."""
        reached = [autograd.will_be_reached(node) for node in self._hooks.accumulators]
        if self._speakers.saw_this_begin():  # without gradients; those that nested backwards have brought are there
            reached = [hit or param.grad is not None for hit, param in zip(reached, self.params, strict=True)]
        if not any(reached):
            return
        if self._pass is None:
            self._open_pass(reached.index(True))
        self._hear_each()
        assert self._pass is not None
        self._pass.is_spoken_for = False
        for param in self._countdown.missing():
            if reached[param]:
                self._countdown.strike_off(param)

    def _end_pass(self, current: BackwardPass) -> None:
        """Backward has ended, and all buckets are under way."""
        if self._finalizes_at_end:
            self._finalize(current)
        else:
            self._move_to(Phase.REDUCING)
            self._guard = OptimizerGuard(self.params, self._not_finalized)

    def finish(self) -> None:
        """Finalize a backward that was not to do so by itself: after it, or in it once all buckets are under way.

        Raises:
            RuntimeError: some gradients have not arrived, or there is no such backward.
        """
        if self._pass is None or not self._pass.is_complete:
            raise RuntimeError(
                "There is no backward to finalize: none was synchronised since the last one was finalized, or not "
                "all of its gradients have arrived. See `should_finalize_after_backward`."
            )
        self._finalize(self._pass)

    def _not_finalized(self) -> RuntimeError:
        return RuntimeError(
            "The last backward has not been finalized, so `.grad` holds gradients that are not averaged. Call "
            "finalize_backward(), or leave `require_manual_backward_finalization` at False."
        )

    def _finalize(self, current: BackwardPass) -> None:
        """Wait for the buckets in launch order and put the averages where the optimizer will look."""
        self._move_to(Phase.FINALIZING)
        if self._usage is not None:
            self._unused_anywhere = self._usage.finish_exchange()
            self._usage.clear()
            self.tell(EventKind.USAGE_EXCHANGED)
        if self._mixed_precision is not None:
            self._mixed_precision.restore()
        for bucket, reduction in zip(self.buckets, current.reductions, strict=True):
            if reduction is not None:
                average = reduction.result()
                self.tell(EventKind.BUCKET_WAITED, bucket.spec.index)
                with torch.no_grad():
                    bucket.unpack(
                        average,
                        untouched=_in_bucket(bucket, self._unused_anywhere),
                        may_hand_over=current.may_hand_over,
                    )
                self.tell(EventKind.BUCKET_UNPACKED, bucket.spec.index)
            else:
                bucket.let_go()
            for optimizer in self.optimizers:
                optimizer.step(bucket.params)
        if current.lent is not None:
            current.lent.give_back()
        if self.awaits_order:
            any_order = list(range(len(self.params)))
            self.bucketing.observe(current.ready_order + current.unused if current.ready_order else any_order)
        if self.options.static_graph:
            self._usage = None  # who uses what is settled for good
        self.last_unused = current.unused
        self._elect_speakers()
        self._speakers.see_backward_end()
        self._move_to(Phase.IDLE)
        self._wait_for_others()
        self.tell(EventKind.BACKWARD_END)

    def _elect_speakers(self) -> None:
        """If this backward has shown who comes last to each run. See [Note: one hook per run]."""
        is_plain = self._mixed_precision is None and self._rpc_context is None
        if self._speakers.may_be_elected and not self._speakers.in_office and self._only_counts and is_plain:
            self._speakers.elect(self._countdown.last_of_runs)

    def _wait_for_others(self) -> None:
        """Futures that somebody wants complete when backward returns, such as those of a buffer hook."""
        at_end, self.at_end = self.at_end, []
        if at_end:
            torch.futures.wait_all(at_end)

    def _drop_interrupted_pass(self) -> None:
        """An exception ended the last backward. Let what is under way land, then forget the pass."""
        assert self._pass is not None
        self.tell(EventKind.ERROR)
        for reduction in self._pass.reductions:
            try:
                if reduction is not None:
                    reduction.result()
            except Exception as error:
                _log.warning("A reduction of the interrupted backward failed too: %s", error)
        for bucket in self.buckets:
            bucket.let_go()
        if self._pass.lent is not None:
            self._pass.lent.give_back()
        if self._usage is not None:
            self._usage.revert()
        if self._recorded_hooks is not None:
            self._recorded_hooks = [0] * len(self.params)
        self._move_to(Phase.IDLE)

    def _missing(self) -> Missing:
        missing = tuple(self._countdown.missing())
        frozen = tuple(param for param in missing if not self.params[param].requires_grad)
        return Missing(self.transport.rank, missing, tuple(self.names), frozen)

    def _warn_of_unfinished(self) -> None:
        missing = self._missing()
        if missing.indices not in self._warned_of:
            self._warned_of.add(missing.indices)
            warnings.warn(not_yet_finished(missing), stacklevel=2)

    def _unfinished(self) -> RuntimeError:
        assert self._pass is not None
        self.tell(EventKind.ERROR)
        missing = self._missing()
        elsewhere = exchange_missing(
            self.transport.store, f"{self._serial}/{self._num_passes}", missing, self.transport.world_size
        )
        return unfinished_reduction(
            missing,
            elsewhere,
            static_graph=self.options.static_graph,
            finds_unused=self.options.find_unused_parameters,
        )

    # ------------------------------------------------------------------ static graph: the recorded backward

    def _reduce_recorded(self, current: BackwardPass, recorded: list[int]) -> None:
        """The first backward of a static graph has only counted hooks; now reduce everything at once."""
        self._hooks_expected, self._recorded_hooks = recorded, None
        self._each_fires_once = all(num_hooks == 1 for num_hooks in recorded)
        for param in range(len(self.params)):
            self._count_as_ready(param)
        current.unused = [param for param, num_hooks in enumerate(recorded) if num_hooks == 0]
        self._end_pass(current)

    # ------------------------------------------------------------------ changed after construction

    def become_static(self) -> None:
        """From now on as if constructed with static_graph=True.

        Raises:
            RuntimeError: training has begun.
        """
        if self._num_passes or self.phase is not Phase.IDLE:
            raise RuntimeError(
                "set_static_graph() should be called before training loop starts and after "
                "DistributedDataParallel is constructed. Pass static_graph=True to the constructor."
            )
        self.options = replace(self.options, static_graph=True)
        self._begin_tracking()

    def move_to(self, transport: Transport) -> None:
        """Go on with other ranks, whatever has become of the last backward. The buckets are rebuilt anew."""
        self.transport = transport
        self.divisor = Divisor(transport, self.options.reduction)
        self._pass, self.phase = None, Phase.IDLE
        self._countdown.is_watched = True
        self._speakers.dismiss()
        self._awaited_backwards.clear()
        self.bucketing.await_another_order()
        if self._usage is not None:
            self._usage.clear()

    def adopt(self, plan: BucketPlan) -> None:
        """Bucket by another plan of the same parameters from the next backward on. Every rank, between steps.

        Raises:
            RuntimeError: a backward is under way.
        """
        if self.phase not in (Phase.IDLE, Phase.ARMED):
            raise RuntimeError(f"minddp: no new buckets while the reducer is in phase {self.phase.name}.")
        self.bucketing.adopt(plan, self.transport.allocate)
        self._regroup()
        self.tell(EventKind.BUCKETS_REBUILT, len(self.buckets))

    def remove_hooks(self) -> None:
        """Take no further part in any backward."""
        self._hooks.remove()

    # ------------------------------------------------------------------ plan and phase

    def progress(self) -> Progress:
        """Where this rank is, for others to hear. Called from another thread: it looks and changes nothing."""
        missing: dict[int, tuple[str, ...]] = {}
        if self._pass is not None:
            for param in self._countdown.missing():
                if self._speakers.in_office and self.params[param].grad is not None:
                    continue  # it has come, but its speaker has not
                bucket = self.plan.slot_of[param].bucket
                missing[bucket] = (*missing.get(bucket, ()), self.names[param])
        return Progress(self.phase.name, self._num_passes, missing=missing)

    @property
    def records_graph(self) -> bool:
        """Whether the next backward only records a static graph, and is reduced when it has ended."""
        return self._recorded_hooks is not None

    @property
    def num_passes(self) -> int:
        """Synchronised backwards that have begun so far."""
        return self._num_passes

    @property
    def serial(self) -> str:
        """A name for this reducer that is the same on every rank."""
        return self._serial

    @property
    def plan(self) -> BucketPlan:
        return self.bucketing.plan

    @property
    def buckets(self) -> list[Bucket | SparseBucket]:
        """In launch order; none before there is memory for them."""
        return self.bucketing.buckets

    @property
    def has_rebuilt(self) -> bool:
        return self.bucketing.has_rebuilt

    @property
    def awaits_order(self) -> bool:
        """Whether the buckets are rebuilt after this backward: the first one, but in a static graph the second.

        All ranks say the same, also one that has only shadowed the first backward and has yet to record its graph.
        """
        settles_usage = self.options.static_graph and self._usage is not None
        return self.options.rebuilds_buckets and not self.has_rebuilt and not settles_usage

    def _begin_tracking(self) -> None:
        """What has to be counted besides gradients, as the options have it."""
        self._hooks_expected = [1] * len(self.params)
        self._recorded_hooks = [0] * len(self.params) if self.options.static_graph else None
        self._each_fires_once = not self.options.static_graph  # as far as is known
        tracks_usage = self.options.find_unused_parameters or self.options.static_graph
        self._usage = UsageMap(len(self.params), self.params[0].device) if tracks_usage and self.params else None

    def _regroup(self) -> None:
        """The plan has changed."""
        self._speakers.dismiss()
        self._countdown.regroup(self.bucketing.members)

    def _specs(self) -> list[ParamSpec]:
        return [
            ParamSpec(name, param.numel(), param.dtype, param.device, sparse=name in self._sparse_names)
            for name, param in zip(self.names, self.params, strict=True)
        ]

    def _serial_number(self) -> str:
        """The same on every rank, and another one for each reducer, even of equal models."""
        model = hashlib.blake2b(repr(self.names).encode(), digest_size=8).hexdigest()
        store = self.transport.store
        return model if store is None else f"{model}/{store.add(f'minddp/{model}/{self.transport.rank}', 1)}"

    def _order_of_rank_0(self, ready_order: list[int]) -> list[int]:
        """Ranks may have seen different orders, but must have one plan."""
        order = torch.tensor(ready_order, dtype=torch.int64, device=self.params[0].device)
        self.transport.broadcast(order, source=0).wait()
        return order.tolist()

    def _move_to(self, phase: Phase) -> None:
        if phase not in ALLOWED[self.phase]:
            raise RuntimeError(f"minddp: a reducer in phase {self.phase.name} cannot become {phase.name}.")
        if self._guard is not None:
            self._guard.lift()
            self._guard = None
        if phase is Phase.IDLE:
            self._pass = None
        if phase is not Phase.ACCUMULATING:
            self._countdown.is_watched = True
        self.phase = phase

    # ------------------------------------------------------------------ telling what happens

    def watch(self, sink: EventSink) -> None:
        """Tell `sink` every event from now on. Several may watch."""
        self._tell_all((*self._sinks, sink))

    def unwatch(self, sink: EventSink) -> None:
        """Tell it no more. Does nothing if it does not watch."""
        self._tell_all(tuple(other for other in self._sinks if other != sink))

    def _tell_all(self, sinks: tuple[EventSink, ...]) -> None:
        self._sinks, self._sink = sinks, fan_out(sinks)
        self._speakers.tell_of_each(self._sink)
        self._countdown.tell_ready = self._teller_of_readiness()

    def _teller_of_readiness(self) -> Callable[[int], object] | None:
        """What a hook calls if somebody watches, with events that are made beforehand. See [Note: the hot path]."""
        if self._sink is None:
            return None
        sink, events = self._sink, [Event(EventKind.PARAM_READY, param) for param in range(len(self.params))]
        return lambda param: sink(events[param])

    def tell(self, kind: EventKind, subject: int = -1) -> None:
        if self._sink is not None:
            self._sink(Event(kind, subject))


def _in_bucket(bucket: Bucket | SparseBucket, per_param: Sequence[bool] | None) -> list[bool] | None:
    """What is known per parameter of the model, for the parameters of one bucket."""
    return None if per_param is None else [per_param[slot.param] for slot in bucket.spec.slots]
