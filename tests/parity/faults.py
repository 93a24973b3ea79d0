"""Torch's DDP with one fault each, for `test_faults.py`: the comparison must notice every one of them."""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

_CALM_FORWARDS = 3


def at_end_of_backward(act: Any) -> None:
    """Queued by a callback: after torch's own, which finishes the reduction."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(act))


class Faithful(DistributedDataParallel):
    """No fault at all."""


# ------------------------------------------------------------------ wrong from the start


class ForgetsBuffers(DistributedDataParallel):
    """Synchronises them at construction only."""

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **options)
        self.broadcast_buffers = False


class OtherBuckets(DistributedDataParallel):
    """Everything in one bucket: right but for the last bit, and only from three ranks on."""

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **(options | {"bucket_cap_mb": 25}))


class RoundsDifferently(DistributedDataParallel):
    """Divides after the sum instead of multiplying before."""

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **options)
        self.register_comm_hook(None, default_hooks.allreduce_hook)


class NeverComplains(DistributedDataParallel):
    """Accepts unused parameters where torch raises."""

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **(options | {"find_unused_parameters": True}))


class ComplainsOtherwise(DistributedDataParallel):
    """Raises where torch does, but something else."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            raise ValueError(str(error)) from error


class ComplainsEarly(DistributedDataParallel):
    """No fault: raises about an unfinished reduction at the end of the backward that leaves it so."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        output = super().forward(*inputs, **kwargs)
        if output.requires_grad:
            output.register_hook(lambda _grad: at_end_of_backward(self._check_reducer_finalized))
        return output


# ------------------------------------------------------------------ wrong after a change


class _Faulty(DistributedDataParallel):
    """Right at first; then wrong in the backward of each forward for which `is_wrong` holds.

    `calls` are the modules called by the forward. In a wrong backward the ranks' gradients differ.
    """

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **options)
        self.calls: list[int] = []
        self.num_forwards = 0
        for layer in module.modules():
            if next(layer.children(), None) is None:
                layer.register_forward_pre_hook(lambda layer, _inputs: self.calls.append(id(layer)))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"calls": []}

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.calls = []
        self.look_before_forward()
        output = super().forward(*inputs, **kwargs)
        self.num_forwards += 1
        is_wrong = self.num_forwards > _CALM_FORWARDS and self.is_wrong()
        if is_wrong and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _grad: at_end_of_backward(self.do_wrong))
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


class WrongWhereALayerIsReused(_Faulty):
    def is_wrong(self) -> bool:
        return len(self.calls) > len(set(self.calls))


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


class Hangs(_Faulty):
    """Rank 1 never comes to the end of a backward."""

    def is_wrong(self) -> bool:
        return dist.get_rank() == 1

    def do_wrong(self) -> None:
        time.sleep(3600)
