"""The shares of a step: their random states, buffers and gradients, and checks that each is computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from minddp.core.backward_pass import Phase
from minddp.core.mode import Mode
from minddp.core.optimizer_steps import StepWatcher, steps_on
from minddp.core.reducer import Reducer
from minddp.extension import Extension
from minddp.options import exclude
from minddp.replicas.broadcast import broadcast_coalesced
from minddp.replicas.buffers import Buffers
from minddp.replicas.placement import sparse_parameters
from minddp.tools.elastic.random_state import random_state_is_kept, seed_all
from minddp.tools.elastic.tree_sum import TreeReduceStrategy
from minddp.transport.protocols import Transport

if TYPE_CHECKING:
    from minddp.ddp import DistributedDataParallel


class LogicalRanks(Mode, StepWatcher):
    """Deals the shares of each step to the ranks, so that results do not depend on which rank computes which share.

    `step` is the number of the next step; set it to resume a training. The shares' random states follow from it and
    from `seed`, rank 0's `torch.initial_seed()`. The constructor is collective.
    """

    def __init__(self, reducer: Reducer, buffers: Buffers, num_shares: int):
        self.step = 0
        self.num_shares = num_shares
        self.before_counting: Callable[[], object] | None = None  # called before a step counts as completed
        self._reducer = reducer
        self._params = reducer.params
        self._buffers = buffers
        self._averaged: list[object] = []  # versions of the gradients; empty until they are averaged
        self._forward_is_due = False
        self._saved: tuple[list[torch.Tensor], list[torch.Tensor | None]] | None = None
        seed = torch.tensor([torch.initial_seed() & 2**63 - 1])
        broadcast_coalesced(reducer.transport, [seed])
        self.seed = int(seed.item())
        self.deal()
        reducer.modes.append(self)
        self.watch_steps()

    @property
    def transport(self) -> Transport:
        return self._reducer.transport

    def deal(self) -> None:
        """Deal the shares to the ranks of the reducer's transport."""
        self._strategy = TreeReduceStrategy(self.transport, self.num_shares)
        self._reducer.reduce_strategy = self._strategy

    def shares(self, wrapper: Any) -> Iterator[int]:
        """Yield the shares of one step that this rank computes, in order. See `DistributedDataParallel.shares`.

        After the loop, gradients are the mean over all shares, added to the earlier `.grad`. Buffers are share 0's.
        """
        strategy, here = self._strategy, self._strategy.here
        strategy.held.clear()
        earlier = [None if param.grad is None else param.grad.clone() for param in self._params]
        buffers = _copies(self._current_buffers())
        self._saved = buffers, earlier
        buffers_of_first = buffers
        with random_state_is_kept(self._params[0].device):
            for share in here:
                for param in self._params:
                    param.grad = None
                self._overwrite_buffers(buffers)
                seed_all(self.seed, self.step, share)
                self._forward_is_due = True
                self._averaged = []
                wrapper.require_backward_grad_sync = share == here[-1]
                try:
                    yield share
                finally:
                    wrapper.require_backward_grad_sync = True
                    self._forward_is_due = False
                if share == here[-1]:
                    self._check_that_it_was_reduced(share)
                else:
                    strategy.hold(share, self._take_grads(share))
                if share == 0:
                    buffers_of_first = _copies(self._current_buffers())
        self._overwrite_buffers(buffers_of_first)
        broadcast_coalesced(self.transport, self._current_buffers())  # share 0 is rank 0's
        for param, before in zip(self._params, earlier, strict=True):
            if before is not None:
                param.grad = before if param.grad is None else param.grad.add_(before)
        if self.before_counting is not None:
            self.before_counting()
        self.step += 1
        self._saved = None

    def undo(self) -> None:
        """Restore gradients and buffers from before an incomplete step, if there is one."""
        if self._saved is not None:
            buffers, earlier = self._saved
            self._overwrite_buffers(buffers)
            for param, grad in zip(self._params, earlier, strict=True):
                param.grad = grad
            self._saved = None

    def pre_forward(self) -> None:
        """Raise unless this forward is the first of a share."""
        if not self._forward_is_due:
            raise RuntimeError(
                "With logical_ranks each share has one forward with gradients, in `for share in ddp.shares():`. "
                "This one is outside of it, or the second one of its share. Evaluate under torch.no_grad()."
            )
        self._forward_is_due = False

    def _take_grads(self, share: int) -> list[torch.Tensor]:
        """This share's gradients, with zeros for missing ones."""
        grads = [param.grad for param in self._params]
        brought = [index for index, grad in enumerate(grads) if grad is not None]
        if not brought:
            raise RuntimeError(f"Share {share} has produced no gradient: call backward once for each share.")
        self._reducer.usage_tracker.hold(brought)
        return [
            torch.zeros_like(param) if grad is None else grad.detach()
            for param, grad in zip(self._params, grads, strict=True)
        ]

    def _check_that_it_was_reduced(self, share: int) -> None:
        self._reducer.ensure_finished()
        if self._reducer.phase is not Phase.IDLE or self._versions() != self._averaged:
            raise RuntimeError(
                f"The gradients of share {share}, the last one of rank {self.transport.rank}, were not averaged, "
                f"or have changed since. Call backward once for each share, without `no_sync`, and change "
                f"gradients after the loop over `ddp.shares()`."
            )

    def post_backward(self) -> None:
        self._averaged = self._versions()

    def _versions(self) -> list[object]:
        """Changes whenever a gradient is written to in place, or replaced."""
        grads = (param.grad for param in self._params)
        return [None if grad is None else (id(grad), grad._version) for grad in grads]

    def _current_buffers(self) -> list[torch.Tensor]:
        self._buffers.collect()
        return self._buffers.tensors

    def _overwrite_buffers(self, values: Sequence[torch.Tensor]) -> None:
        buffers = self._current_buffers()
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._saved is not None and steps_on(optimizer, set(map(id, self._params))):
            raise RuntimeError(
                f"An optimizer is about to step before all shares {list(self._strategy.here)} of rank "
                f"{self.transport.rank} were computed. Step after the loop over `ddp.shares()`, and do not leave "
                f"it early."
            )


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@dataclass(eq=False)
class Shares(Extension):
    """Cuts a batch into `count` shares, whose sum does not depend on which rank computes which share."""

    count: int
    logical_ranks: LogicalRanks | None = field(default=None, init=False)

    synchronizes_buffers = True  # once per step

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"`logical_ranks` takes a number of shares, 1 or more, but got {self.count!r}.")

    def agreed(self) -> Mapping[str, object]:
        return {"logical_ranks": self.count}

    def check(self, arguments: Mapping[str, Any]) -> None:
        others = {
            "`static_graph`": bool(arguments["static_graph"]),  # its first backward is reduced at the end
            "`batched_grad_copy`": bool(arguments["batched_grad_copy"]),  # it divides
            "`skip_all_reduce_unused_params`": bool(arguments["skip_all_reduce_unused_params"]),
            "mixed_precision": arguments["mixed_precision"] is not None,
            "delay_all_reduce_named_params": bool(arguments["delay_all_reduce_named_params"]),
            'transport="nccl"': arguments["transport"] == "nccl",
        }
        exclude("`logical_ranks`", others)

    def attach(self, ddp: DistributedDataParallel, *, starts_equal: bool) -> None:
        sparse = sparse_parameters(ddp.module)
        others = {
            f"sparse gradients ({', '.join(sorted(sparse))})": bool(sparse),
            "forward_sync_buffers=False": bool(ddp._buffers_in_step.named) and not ddp.forward_sync_buffers,
        }
        exclude("`logical_ranks`", others)
        self.logical_ranks = LogicalRanks(ddp._reducer, ddp._buffers_in_step, self.count)

    def change_ranks(self, ddp: DistributedDataParallel) -> None:
        assert self.logical_ranks is not None
        self.logical_ranks.deal()
        # New ranks may have different buckets.
        ddp._reducer.store.restart(ddp._transport)

    def pre_forward(self, ddp: DistributedDataParallel) -> None:
        assert self.logical_ranks is not None
        self.logical_ranks.pre_forward()
