"""Torch's DDP with one fault each, for `test_faults.py`: right at first, wrong after a certain change.

Each has a condition, looked at around its forward. In the backward after it the ranks' gradients differ.
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_CALM_FORWARDS = 3


class Faithful(DistributedDataParallel):
    """No fault at all."""


class _Faulty(DistributedDataParallel):
    """Wrong in the backward of each forward for which `is_wrong` holds; `calls` are the modules called by it."""

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **options)
        self.calls: list[int] = []
        self.calls_before: list[int] = []
        self.num_forwards = 0
        for layer in module.modules():
            if next(layer.children(), None) is None:
                layer.register_forward_pre_hook(lambda layer, _inputs: self.calls.append(id(layer)))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"calls_before": [], "calls": []}

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.calls_before, self.calls = self.calls, []
        self.look_before_forward()
        output = super().forward(*inputs, **kwargs)
        self.num_forwards += 1
        is_wrong = self.num_forwards > _CALM_FORWARDS and self.is_wrong()
        if is_wrong and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _grad: self._at_end_of_backward(self.do_wrong))
        return output

    def look_before_forward(self) -> None:
        """Note what the condition depends on."""

    def is_wrong(self) -> bool:
        raise NotImplementedError

    def do_wrong(self) -> None:
        with torch.no_grad():
            for param in self.module.parameters():
                if param.grad is not None:
                    param.grad.add_(dist.get_rank() + 1)
                    return

    def _at_end_of_backward(self, act: Any) -> None:
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(act))  # queued by a callback: after torch's own, which finishes the reduction


class WrongWhereALayerIsReused(_Faulty):
    def is_wrong(self) -> bool:
        return len(self.calls) > len(set(self.calls))


class WrongInAnotherOrder(_Faulty):
    def is_wrong(self) -> bool:
        return self.calls != self.calls_before and sorted(self.calls) == sorted(self.calls_before)


class WrongWhereGradsExist(_Faulty):
    def look_before_forward(self) -> None:
        self.have_grads = any(param.grad is not None for param in self.module.parameters())

    def is_wrong(self) -> bool:
        return self.have_grads


class WrongAfterNewMemory(_Faulty):
    addresses: tuple[int, ...] = ()

    def is_wrong(self) -> bool:
        before, self.addresses = self.addresses, tuple(param.data_ptr() for param in self.module.parameters())
        return before != () and before != self.addresses


class WrongAfterEvaluation(_Faulty):
    was_without_grad = False

    def look_before_forward(self) -> None:
        self.was_before, self.was_without_grad = self.was_without_grad, not torch.is_grad_enabled()

    def is_wrong(self) -> bool:
        return self.was_before


class WritesToKeptGrads(_Faulty):
    """Reuses the memory of gradients although the script still refers to them."""

    handed_out: tuple[weakref.ref, ...] = ()

    def look_before_forward(self) -> None:
        grads = {id(param.grad) for param in self.module.parameters()}
        for reference in self.handed_out:
            grad = reference()
            if grad is not None and id(grad) not in grads and sys.getrefcount(grad) > 2:
                grad.detach().zero_()
        self.handed_out = tuple(
            weakref.ref(param.grad) for param in self.module.parameters() if param.grad is not None
        )

    def is_wrong(self) -> bool:
        return False


class NeverRaises(_Faulty):
    """Where torch's wrapper objects to what the last backward has left, trains on without a mean."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError:
            return self.module(*inputs, **kwargs)

    def is_wrong(self) -> bool:
        return False


class Hangs(_Faulty):
    """Rank 1 never comes to the end of a backward."""

    def is_wrong(self) -> bool:
        return dist.get_rank() == 1

    def do_wrong(self) -> None:
        time.sleep(3600)
