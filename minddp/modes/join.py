"""Uneven inputs: a rank that has exhausted its inputs keeps making the others' collectives, with zeros.

Collectives need every rank. So a rank that has joined (its inputs ended early) *shadows* the active ranks: in each
of their steps it makes the same collectives in the same order, and contributes zeros. The protocol is that of
`torch.distributed.algorithms.Join`: an active rank calls `notify_join_context` in each forward; a joined rank
calls `main_hook` as long as any rank notifies, and all call `post_hook` at the end.

A step of an active rank, and what its shadow does:

    forward    notify                      the loop in Join counts the active ranks
               all-gather the step's kind  the same: the highest active rank, and what the step will do
               rebuild the buckets         the same
               synchronise buffers         the same, from the highest active rank
    backward   all-reduce each bucket      all-reduce zeros
               exchange marks of use       exchange "none"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from minddp.core.events import EventKind
from minddp.core.reducer import Reducer
from minddp.modes.delayed import DelayedAllReduce
from minddp.modes.divisor import Divisor
from minddp.options import Options, exclude
from minddp.replicas.placement import Placement
from minddp.transport.protocols import Transport


class UnevenInputs(Joinable):
    """The part of the wrapper that is about `join`. What it needs of the other parts is declared here."""

    process_group: dist.ProcessGroup
    forward_sync_buffers: bool
    require_backward_grad_sync: bool
    require_forward_param_sync: bool
    _options: Options
    _transport: Transport
    _reducer: Reducer
    _divisor: Divisor
    _placement: Placement
    _delayed: DelayedAllReduce | None

    synchronize: Callable[..., None]
    _synchronizes_buffers: Callable[..., bool]
    _synchronize_buffers: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        self._authoritative_rank = 0  # of the last `join`; torch's own tests read it
        self._buffers_from = 0  # the rank whose buffers this step begins with

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context for a training loop in which ranks run out of inputs at different times.

        Args:
            divide_by_initial_world_size: every sample counts the same; else gradients are averaged over the
                ranks that still have inputs.
            enable: False makes the context do nothing.
            throw_on_early_termination: all ranks raise `RuntimeError` when the first one runs out.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What `Join` calls on a rank that has exhausted its inputs.

        Raises:
            ValueError: combined with an option that a rank without inputs cannot follow.
        """
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        skips = self._options.skip_all_reduce_unused_params
        sums_by_active = self._options.reduction == "sum" and not self._divide_by_initial_world_size
        delays = self._delayed is not None
        for is_on, option, why in (
            (skips, "skip_all_reduce_unused_params", "a rank without inputs cannot know which buckets others skip"),
            (delays, "delay_all_reduce_named_params", "a rank without inputs has no gradient that triggers it"),
            (sums_by_active, 'reduction="sum" with divide_by_initial_world_size=False', "nothing is divided"),
        ):
            exclude("`join`", {option: is_on}, why)
        return Shadow(self)

    @property
    def join_device(self) -> torch.device:
        return self._placement.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    def _announce_to_joined_ranks(self) -> None:
        """Announce to the joined ranks that this rank is active, and the kind of step that begins."""
        announced = Join.notify_join_context(self)
        by_active = announced is not None and not self._divide_by_initial_world_size
        self._divisor.divide_by_active_ranks(announced.get_future() if by_active else None)
        if self._join_config.enable:
            trains = torch.is_grad_enabled()
            step = ActiveStep(self._transport.rank, trains, trains and self.require_backward_grad_sync)
            self._buffers_from = exchange_step(self._transport, self.join_device, step).highest_active_rank
        elif self._buffers_from != 0:  # asked first: to set an attribute of a module is slow
            self._buffers_from = 0


class ActiveStep(NamedTuple):
    """The step that begins, which is of one kind on all active ranks."""

    highest_active_rank: int
    trains: bool  # gradients are enabled
    is_synchronised: bool  # its backward will be reduced


class Shadow(JoinHook):
    """What one module does on a rank that has exhausted its inputs."""

    def __init__(self, ddp: UnevenInputs):
        super().__init__()
        self._ddp = ddp

    def main_hook(self) -> None:
        """Shadow one step of the ranks that still have inputs."""
        ddp, reducer = self._ddp, self._ddp._reducer
        reducer.ensure_finished()
        step = exchange_step(ddp._transport, ddp.join_device, ActiveStep(-1, False, False))
        ddp._buffers_from = step.highest_active_rank
        if step.trains:
            reducer.rebuild_if_due()
        for after_forward in (False, True):
            if ddp._synchronizes_buffers(after_forward=after_forward):
                ddp._synchronize_buffers()
        ddp.require_forward_param_sync = step.is_synchronised
        if step.is_synchronised:
            shadow_backward(reducer)

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks end with the model of one that was trained to the last."""
        ddp = self._ddp
        mine = ddp._transport.rank if is_last_joiner else -1
        last = exchange_step(ddp._transport, ddp.join_device, ActiveStep(mine, False, False))
        ddp._authoritative_rank = last.highest_active_rank
        ddp.synchronize(ddp._authoritative_rank, buffers=ddp.forward_sync_buffers)


def shadow_backward(reducer: Reducer) -> None:
    """Take part, with zeros, in a backward of the other ranks: the same collectives in the same order."""
    observes_order = reducer.awaits_order
    reducer.num_passes += 1
    for mode in reducer.modes:
        mode.shadow_begins()
    under_way = []
    for bucket in (buckets := reducer.buckets):
        zeros = torch.zeros_like(bucket.wire)
        reducer.events.emit(EventKind.BUCKET_LAUNCHED, bucket.spec.index)
        for mode in reducer.modes:
            mode.before_launch(bucket, zeros)
        under_way.append(reducer.reduce_strategy.launch(bucket, zeros, is_last=bucket is buckets[-1]))
    reducer.expectation.shadow(reducer.transport)
    for reduction in under_way:
        reduction.result()
    reducer.store.end_pass()
    if observes_order:
        reducer.store.observe(list(range(len(reducer.params))))
    reducer.wait_for_futures()


def exchange_step(transport: Transport, device: torch.device, ours: ActiveStep) -> ActiveStep:
    """The step of the active ranks; a joined rank passes -1 and what is false. Collective."""
    steps = torch.stack(list(transport.all_gather(torch.tensor(ours, device=device))))
    rank, trains, is_synchronised = steps.amax(0).tolist()
    return ActiveStep(rank, bool(trains), bool(is_synchronised))
