"""Adapters for a course: the rungs of `reference/` under the tests of Stanford's CS336, assignment 2.

    from examples.cs336 import *  # at the end of the course's tests/adapters.py; this repository is on PYTHONPATH

The names and arguments are those that the course publishes, of 2025 and of 2026. docs/courses.md leads from each
problem of the assignment to its rung.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from examples.sharded_optimizer import ShardedOptimizer
from reference.bucketed import MIB, Bucketed
from reference.overlapped import Overlapped
from reference.zero3 import Zero3


def get_ddp_individual_parameters(module: nn.Module) -> nn.Module:
    return Overlapped(module)


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float | None) -> nn.Module:
    """Without a size all gradients share one bucket."""
    nbytes = sum(param.nbytes for param in module.parameters())
    return Bucketed(module, nbytes if bucket_size_mb is None else int(bucket_size_mb * MIB))


def get_fsdp(module: nn.Module, compute_dtype: torch.dtype | None = None) -> nn.Module:
    """The rung computes in the parameters' own dtype."""
    if compute_dtype not in (None, torch.float32):
        raise NotImplementedError(f"reference/zero3.py does not compute in {compute_dtype}: pass None.")
    return Fsdp(module, partial(torch.optim.SGD, lr=0.0))  # the course makes the optimizer that steps


def after_backward(wrapper: Any, optimizer: Optimizer) -> None:
    wrapper.synchronize()


def on_train_batch_start(wrapper: nn.Module, optimizer: Optimizer) -> None:
    """A rung is ready for the next step when `synchronize` returns."""


get_ddp: Callable[[nn.Module], nn.Module] = get_ddp_individual_parameters
ddp_on_after_backward = ddp_individual_parameters_on_after_backward = after_backward
ddp_bucketed_on_after_backward = fsdp_on_after_backward = after_backward
ddp_bucketed_on_train_batch_start = on_train_batch_start


class Fsdp(Zero3):
    """Its parameters are the parts that this rank owns, for an optimizer of the caller's."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from (layer.own for layer in self.layers)


def fsdp_gather_full_params(fsdp_model: Fsdp) -> dict[str, Tensor]:
    """All parameters, whole; the frozen ones are on every rank."""
    frozen = {name: param for name, param in fsdp_model.module.named_parameters() if not param.requires_grad}
    return {**fsdp_model.weights(), **frozen}


get_sharded_optimizer = ShardedOptimizer
