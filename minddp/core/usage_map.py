"""Which parameters were used: by this rank, and by any rank.

A parameter that no rank has used must keep its gradient as it is (None, or what earlier steps left there); one
that some rank has used gets the average everywhere, with zeros from the ranks that did not use it. So every
rank notes what it used since the last reduction, including micro-batches under no_sync, and the notes are
summed over the ranks beside the gradients.

[Note: marks on a GPU]
Marks are made on the host and summed on the device. If all parameters were used they are all ones, which the device
can write by itself, and the host need not read the sums. Otherwise they are copied from memory of their own, pinned
so that the host goes on meanwhile; torch's allocator does not reuse it before it has been read. A CUDA graph cannot
capture that: every replay would copy from there again, and the sums could not be read on the host. So only a step
that uses all parameters can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minddp.core.expectation import HookHandler
from minddp.platform import streams
from minddp.transport.protocols import Transport, Work


class UsageMap:
    """One mark per parameter, and the sum of the marks over all ranks once exchanged.

    `sums` are those of the last exchange, int32, on the parameters' device; zeros before the first one.
    `grads_are_in_context`: gradients arrive in a distributed autograd context, so `.grad` says nothing of them.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]):
        self._params = params
        self._device = params[0].device
        self._marks = [0] * len(params)
        self.sums = torch.zeros(len(params), dtype=torch.int32, device=self._device)
        self.grads_are_in_context = False
        self.held: set[int] = set()  # parameters with gradients that are not in `.grad`, see `Expectation.hold`
        self._work: Work | None = None
        self._marks_before = list(self._marks)

    def begin_pass(self) -> None:
        """Remember the marks so far, for the case that the pass does not come to its end."""
        self._marks_before = list(self._marks)

    def abandon(self) -> None:
        """Drop what the interrupted pass has marked; marks from under no_sync stay."""
        if self._work is not None:
            self._work.wait()
        self._marks = self._marks_before
        self._work = None

    def marking(self, handler: HookHandler) -> HookHandler:
        """`handler`, after a mark for the parameter if it has a gradient: what has arrived may be undefined."""

        def mark_and_handle(param: int) -> None:
            if self._params[param].grad is not None or self.grads_are_in_context:
                self._marks[param] = 1
            handler(param)

        return mark_and_handle

    def begin_exchange(self, transport: Transport) -> None:
        """Start summing the marks over the ranks. A mark without a gradient is of one that was thrown away.

        Raises:
            RuntimeError: a CUDA graph captures a backward that has left parameters unused.
        """
        has_grad = [param.grad is not None or i in self.held for i, param in enumerate(self._params)]
        self._marks = [int(mark and kept) for mark, kept in zip(self._marks, has_grad, strict=True)]
        self.sums = self._marks_on_device()
        self._work = transport.all_reduce(self.sums)

    def shadow(self, transport: Transport) -> Sequence[bool] | None:
        """Exchange marks of a rank that has used nothing; per parameter, True if no rank has used it."""
        nothing = UsageMap(self._params)
        nothing.begin_exchange(transport)
        return nothing.finish_exchange()

    def _marks_on_device(self) -> torch.Tensor:
        """See [Note: marks on a GPU]."""
        if all(self._marks):
            return torch.ones(len(self._marks), dtype=torch.int32, device=self._device)
        if streams.has_streams(self._device) and streams.is_capturing(self._device):
            raise RuntimeError(
                f"A CUDA graph captures this backward, but it left {self._marks.count(0)} of {len(self._marks)} "
                f"parameters unused. Whether other ranks have used them is read by the host, which no graph can "
                f"do. Use every parameter in the step that is captured, or pass static_graph=True, which settles "
                f"what each rank uses in the first steps."
            )
        return streams.copied_to(self._device, self._marks, torch.int32)

    def finish_exchange(self) -> Sequence[bool] | None:
        """Per parameter, True if no rank used it; `None` if this one used all: reading a GPU halts the host."""
        assert self._work is not None, "begin_exchange comes first"
        self._work.wait()
        if all(self._marks):
            return None
        return [total == 0 for total in self.sums.tolist()]

    def clear(self) -> None:
        self._marks = [0] * len(self._marks)
        self.held.clear()
        self._work = None
