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

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from minddp.core.events import EventKind
from minddp.core.reducer import Reducer
from minddp.modes.delayed import DelayedAllReduce
from minddp.modes.divisor import Divisor
from minddp.options import Options
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
    _delayed: DelayedAllReduce | None

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def synchronize(self, source: int = 0, *, buffers: bool = True) -> None: ...

    @abstractmethod
    def _synchronizes_buffers(self, *, after_forward: bool) -> bool: ...

    @abstractmethod
    def _synchronize_buffers(self) -> None: ...

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
        skips, tunes = self._options.skip_all_reduce_unused_params, self._options.tunes_buckets
        sums_by_active = self._options.reduction == "sum" and not self._divide_by_initial_world_size
        delays = self._delayed is not None
        for is_on, option, why in (
            (skips, "skip_all_reduce_unused_params", "a rank without inputs cannot know which buckets others skip"),
            (delays, "delay_all_reduce_named_params", "a rank without inputs has no gradient to give the sign"),
            (tunes, 'bucket_cap_mb="auto"', "a rank without inputs makes no steps to be observed"),
            (sums_by_active, 'reduction="sum" with divide_by_initial_world_size=False', "nothing is divided"),
        ):
            if is_on:
                raise ValueError(f"`join` and {option} exclude each other: {why}.")
        return Shadow(self)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    def _announce_to_joined_ranks(self) -> None:
        """Announce to the joined ranks that this rank is active, and the kind of step that begins."""
        announced = Join.notify_join_context(self)
        by_active = announced is not None and not self._divide_by_initial_world_size
        self._divisor.divide_by_active_ranks(announced.get_future() if by_active else None)
        self._buffers_from = 0
        if self._join_config.enable:
            trains = torch.is_grad_enabled()
            syncs = trains and self.require_backward_grad_sync
            step = announce_step(self._transport, self.device, trains=trains, is_synchronised=syncs)
            self._buffers_from = step.highest_active_rank


@dataclass(frozen=True)
class ActiveStep:
    """The step that begins, which is of one kind on all active ranks.

    `trains`: it runs with gradients enabled. `is_synchronised`: its backward will be reduced.
    """

    highest_active_rank: int
    trains: bool
    is_synchronised: bool


class Shadow(JoinHook):
    """What one module does on a rank that has exhausted its inputs."""

    def __init__(self, ddp: UnevenInputs):
        super().__init__()
        self._ddp = ddp

    def main_hook(self) -> None:
        """Shadow one step of the ranks that still have inputs."""
        ddp, reducer = self._ddp, self._ddp._reducer
        reducer.ensure_finished()
        step = receive_step(ddp._transport, ddp.device)
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
        ddp._authoritative_rank = int(_gathered(ddp._transport, ddp.device, [mine]).max())
        ddp.synchronize(ddp._authoritative_rank, buffers=ddp.forward_sync_buffers)


def shadow_backward(reducer: Reducer) -> None:
    """Take part, with zeros, in a backward of the other ranks: the same collectives in the same order."""
    observes_order = reducer.awaits_order
    reducer.num_passes += 1
    reducer.store.make_buckets(reducer.transport.allocate)
    under_way = []
    for bucket in reducer.buckets:
        zeros = torch.zeros_like(bucket.wire)
        reducer.events.emit(EventKind.BUCKET_LAUNCHED, bucket.spec.index)
        under_way.append(reducer.reducing.launch(bucket, zeros, is_last=bucket is reducer.buckets[-1]))
    reducer.expectation.shadow(reducer.transport)
    for reduction in under_way:
        reduction.result()
    if observes_order:
        reducer.store.observe(list(range(len(reducer.params))))
    reducer.backward_end.wait_for_futures()


def announce_step(transport: Transport, device: torch.device, *, trains: bool, is_synchronised: bool) -> ActiveStep:
    """An active rank announces the step that it begins. Collective."""
    return _exchange_step(transport, device, [transport.rank, trains, is_synchronised])


def receive_step(transport: Transport, device: torch.device) -> ActiveStep:
    """A joined rank receives the step that the active ranks begin. Collective."""
    return _exchange_step(transport, device, [-1, False, False])


def _exchange_step(transport: Transport, device: torch.device, step: list[int]) -> ActiveStep:
    rank, trains, is_synchronised = _gathered(transport, device, step).amax(0).tolist()
    return ActiveStep(rank, bool(trains), bool(is_synchronised))


def _gathered(transport: Transport, device: torch.device, numbers: list[int]) -> torch.Tensor:
    """Each rank's numbers, one row for each rank."""
    return torch.stack(list(transport.all_gather(torch.tensor(numbers, device=device))))
