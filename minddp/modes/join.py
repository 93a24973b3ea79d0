"""Uneven inputs: a rank without inputs takes part in the other ranks' collectives with zeros.

The protocol is that of `torch.distributed.algorithms.Join`: an active rank calls `notify_join_context` in each
forward; a joined rank calls `main_hook` as long as any rank notifies; all ranks call `post_hook` at the end. A
joined rank *shadows* the active ones: it starts the same collectives in the same order.

    a step      of an active rank          of its shadow

    forward     notify                     the loop in Join counts the active ranks
                all-gather the step's kind the same
                rebuild the buckets        the same
                broadcast buffers          the same, from the highest active rank
    backward    all-reduce each bucket     all-reduce zeros
                exchange the usage map     exchange an empty one
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from minddp.core.events import EventKind
from minddp.core.reducer import Reducer
from minddp.modes.divisor import Divisor
from minddp.options import exclude
from minddp.replicas.placement import Placement
from minddp.replicas.synchronization import SynchronizedReplicas
from minddp.transport.protocols import Transport


class UnevenInputs(SynchronizedReplicas, Joinable):
    """The wrapper's part in `join`, with declarations of the attributes that it uses."""

    require_backward_grad_sync: bool
    _divisor: Divisor
    _placement: Placement

    def __init__(self) -> None:
        super().__init__()
        self._authoritative_rank = 0  # after the last `join`; torch's own tests read it
        self._buffers_from = 0  # the rank whose buffers are broadcast in this step

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context for a training loop in which ranks exhaust their inputs at different times.

        Args:
            divide_by_initial_world_size: divide gradients by the number of all ranks, else by the number of ranks
                that still have inputs.
            enable: False makes the context do nothing.
            throw_on_early_termination: all ranks raise `RuntimeError` when the first one has no more inputs.
        """
        divides = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return Join([self], enable, throw_on_early_termination, **divides)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hooks for a joined rank. Called by `Join`.

        Raises:
            ValueError: an option excludes `join`.
        """
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        others = {
            "skip_all_reduce_unused_params": self._options.skip_all_reduce_unused_params,
            "delay_all_reduce_named_params": self._delayed is not None,
        }
        exclude("`join`", others, "a rank without inputs cannot know which all-reduces the others start")
        return Shadow(self)

    @property
    def join_device(self) -> torch.device:
        return self._placement.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    def _announce_to_joined_ranks(self) -> None:
        """At the beginning of a forward: tell the joined ranks what this step will do."""
        announced = Join.notify_join_context(self)
        by_active = announced is not None and not self._divide_by_initial_world_size
        self._divisor.divide_by_active_ranks(announced.get_future() if by_active else None)
        self._divisor.is_joined = self._join_config.enable
        if self._join_config.enable:
            trains = torch.is_grad_enabled()
            step = ActiveStep(self._transport.rank, trains, trains and self.require_backward_grad_sync)
            self._buffers_from = exchange_step(self._transport, self.join_device, step).highest_active_rank
        elif self._buffers_from != 0:  # setting an attribute of a module is slow
            self._buffers_from = 0


class ActiveStep(NamedTuple):
    """The step that begins, of the same kind on all active ranks."""

    highest_active_rank: int
    trains: bool  # gradients are enabled
    is_synchronised: bool  # its backward will be reduced


class Shadow(JoinHook):
    """The hooks of one module on a joined rank."""

    def __init__(self, ddp: UnevenInputs):
        super().__init__()
        self._ddp = ddp

    def main_hook(self) -> None:
        """Shadow one step of the active ranks."""
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
        """Give all ranks the parameters of a rank that was active to the end."""
        ddp = self._ddp
        mine = ddp._transport.rank if is_last_joiner else -1
        last = exchange_step(ddp._transport, ddp.join_device, ActiveStep(mine, False, False))
        ddp._authoritative_rank = last.highest_active_rank
        ddp.synchronize(ddp._authoritative_rank, buffers=ddp.forward_sync_buffers)


def shadow_backward(reducer: Reducer) -> None:
    """Take part in a backward of the active ranks, with zeros: the same collectives in the same order."""
    observes_order = reducer.awaits_order
    reducer.num_passes += 1
    for mode in reducer.modes:
        mode.shadow_begins()
    reductions = []
    for bucket in (buckets := reducer.store.all()):
        zeros = torch.zeros_like(bucket.comm_buffer)
        reducer.events.emit(EventKind.BUCKET_LAUNCHED, bucket.spec.index)
        for mode in reducer.modes:
            mode.before_launch(bucket, zeros)
        reductions.append(reducer.reduce_strategy.launch(bucket, zeros, is_last=bucket is buckets[-1]))
    reducer.usage_tracker.shadow(reducer.transport)
    for reduction in reductions:
        reduction.result()
    reducer.store.end_pass()
    if observes_order:
        reducer.store.observe(list(range(len(reducer.params))))
    reducer.wait_for_futures()


def exchange_step(transport: Transport, device: torch.device, ours: ActiveStep) -> ActiveStep:
    """The step of the active ranks. A joined rank passes `ActiveStep(-1, False, False)`. Collective."""
    steps = torch.stack(list(transport.all_gather(torch.tensor(ours, device=device))))
    rank, trains, is_synchronised = steps.amax(0).tolist()
    return ActiveStep(rank, bool(trains), bool(is_synchronised))
