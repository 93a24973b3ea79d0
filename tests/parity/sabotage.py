"""Torch's DDP with one fault each, for `test_harness.py`: the comparison must notice every one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel


class Faithful(DistributedDataParallel):
    """No fault at all."""


class ForgetsBuffers(DistributedDataParallel):
    """Synchronises them at construction only."""

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **options)
        self.broadcast_buffers = False


class StartsApart(DistributedDataParallel):
    """Every rank keeps its own initial weights."""

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **(options | {"init_sync": False}))


class OtherBuckets(DistributedDataParallel):
    """Everything in one bucket: right but for the last bit, and only from three ranks on."""

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **(options | {"bucket_cap_mb": 25}))


class RoundsDifferently(DistributedDataParallel):
    """Divides after the sum instead of multiplying before."""

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **options)
        self.register_comm_hook(None, default_hooks.allreduce_hook)


class NeverSilent(DistributedDataParallel):
    """Reduces under no_sync too."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


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
        queue = torch.autograd.Variable._execution_engine.queue_callback
        # Queued by a callback, and so called after torch's own, which finishes the reduction.
        output.register_hook(lambda _grad: queue(lambda: queue(self._check_reducer_finalized)))
        return output


class ComplainsForNothing(DistributedDataParallel):
    """Raises in every backward."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        output = super().forward(*inputs, **kwargs)
        output.register_hook(self._complain)
        return output

    def _complain(self, grad: torch.Tensor) -> None:
        raise RuntimeError("Expected to have finished reduction")


class ZeroesUnused(DistributedDataParallel):
    """Gives parameters without gradient one of zeros."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        for param in self.module.parameters():
            if param.grad is None and param.requires_grad:
                param.grad = torch.zeros_like(param)
        return super().forward(*inputs, **kwargs)
