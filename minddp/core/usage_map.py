"""Which parameters were used: by this rank, and by any rank.

A parameter that no rank has used must keep its gradient (None, or a value from earlier steps). One that some rank
has used gets the average on every rank, to which the other ranks contribute zeros. So every rank marks the
parameters that it has used since the last reduction, including micro-batches under no_sync, and the marks are
summed over the ranks beside the gradients. Two more marks say whether the backward has reached all outputs of its
forward, and whether it was the first one of it: on all ranks or on none, or else ranks are in different steps.

Marks are made on the host and summed on the device. If all parameters were used, all marks are ones: the device
writes them by itself, and the host need not read the sums. Otherwise they are copied from fresh pinned memory, so
that the host does not wait; torch's allocator does not reuse it before it has been read. A CUDA graph cannot
capture that: every replay would copy from there again, and the host could not read the sums. So only a step that
uses all parameters can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from minddp.core.errors import unequal_backwards
from minddp.platform import streams
from minddp.transport.protocols import Transport, Work


class UsageMap:
    """One mark per parameter, and the sums of the marks over all ranks."""

    def __init__(self, params: Sequence[torch.nn.Parameter]):
        self._params = params
        self._device = params[0].device
        self._marks = [0] * len(params)
        self.sums = torch.zeros(len(params), dtype=torch.int32, device=self._device)  # of the last exchange
        # On how many ranks the last backward has left no output, and on how many it was the first of its forward.
        self._num_complete, self._num_first = torch.tensor([0, 0])
        self.is_further = False
        self._world_size = 0
        self.rank = 0
        self.grads_are_in_context = False  # a distributed autograd context has the gradients, not `.grad`
        self.held: set[int] = set()  # parameters whose gradients are not in `.grad`, see `UsageTracker.hold`
        self._work: Work | None = None
        self._marks_before = list(self._marks)

    def begin_pass(self) -> None:
        """Remember the current marks, in case the pass is interrupted."""
        self._marks_before = list(self._marks)

    def abandon(self) -> None:
        """Discard the marks of the interrupted pass; marks made under no_sync stay."""
        if self._work is not None:
            self._work.wait()
        self._marks = self._marks_before
        self._work = None

    def marking(self, handler: Callable[[int], object]) -> Callable[[int], object]:
        """`handler`, preceded by a mark if the parameter has a gradient: one that arrives may be undefined."""

        def mark_and_handle(param: int) -> None:
            if self._params[param].grad is not None or self.grads_are_in_context:
                self._marks[param] = 1
            handler(param)

        return mark_and_handle

    def begin_exchange(
        self, transport: Transport, *, leaves_outputs: bool = False, is_further: bool = False
    ) -> None:
        """Start summing the marks over the ranks. A mark counts only if there is a gradient.

        `leaves_outputs`: this backward has not reached all outputs of its forward; `is_further`: another one came
        before it.

        Raises:
            RuntimeError: a CUDA graph captures a backward that has left parameters unused.
        """
        has_grad = [param.grad is not None or i in self.held for i, param in enumerate(self._params)]
        self._marks = [int(mark and kept) for mark, kept in zip(self._marks, has_grad, strict=True)]
        buffer = self._marks_on_device()
        if leaves_outputs:
            buffer[-2].zero_()
        if is_further:
            buffer[-1].zero_()
        self.sums, self._num_complete, self._num_first = buffer[:-2], buffer[-2], buffer[-1]
        self.is_further = is_further
        self._world_size, self.rank = transport.world_size, transport.rank
        self._work = transport.all_reduce(buffer)

    def any_rank_left_outputs(self) -> bool:
        """True, on all ranks, if the last backward left outputs of a forward on one. Waits for a GPU."""
        return int(self._num_complete) < self._world_size

    def shadow(self, transport: Transport) -> Sequence[bool] | None:
        """Exchange marks of a rank that has used nothing; per parameter, True if no rank has used it."""
        nothing = UsageMap(self._params)
        nothing.begin_exchange(transport)
        return nothing.finish_exchange()

    def _marks_on_device(self) -> torch.Tensor:
        if all(self._marks):
            return torch.ones(len(self._marks) + 2, dtype=torch.int32, device=self._device)
        if streams.is_capturing(self._device):
            raise RuntimeError(
                f"A CUDA graph captures this backward, but it left {self._marks.count(0)} of {len(self._marks)} "
                f"parameters unused. The host has to read if other ranks have used them, which no graph can do. "
                f"Use every parameter in the step that is captured, or pass static_graph=True, which records in "
                f"the first steps which parameters each rank uses."
            )
        return streams.copied_to(self._device, [*self._marks, 1, 1], torch.int32)

    def finish_exchange(self) -> Sequence[bool] | None:
        """Per parameter, True if no rank used it. `None`, without waiting for a GPU, if this rank used all.

        Raises:
            RuntimeError: this is the first backward of a forward on some ranks, and a further one on others. On a
                GPU only the latter look, and ranks that have to read the sums anyway.
        """
        assert self._work is not None, "begin_exchange comes first"
        self._work.wait()
        used_all = all(self._marks)
        if self.is_further or not used_all or not streams.has_streams(self._device):
            num_first = int(self._num_first)
            if num_first > 0 if self.is_further else num_first < self._world_size:
                raise unequal_backwards(self.rank, self.is_further, num_first, self._world_size)
        return None if used_all else [total == 0 for total in self.sums.tolist()]

    def clear(self) -> None:
        self._marks = [0] * len(self._marks)
        self.held.clear()
        self._work = None
