"""Communication hooks that torch's wrapper brings along, as functions of (state, bucket)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from minddp.comm_hooks import GradBucket
from minddp.core import autograd


def builtin_hook(kind: dist.BuiltinCommHookType) -> Callable[[Any, GradBucket], torch._C.Future]:
    """Torch writes them in C++, too (`torch/csrc/distributed/c10d/default_comm_hooks.cpp`); the bits are the same.

    Raises:
        TypeError: something else than a member of `dist.BuiltinCommHookType`.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooks: dict[Any, Callable] = {
        dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    if not isinstance(kind, dist.BuiltinCommHookType):
        raise TypeError(f"A built-in hook is one of {', '.join(map(str, hooks))}, but got {kind!r}.")
    return hooks[kind]


def apply_optim_in_backward_hook(
    ddp_reference: weakref.ref[Any], bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average, and step the optimizers that parameters bring along; their gradients are dropped after backward.

    For `torch.distributed.optim._apply_optimizer_in_backward`. Torch's hook of this name does it on a stream of its
    own, which a machine without an accelerator does not have.
    """
    ddp = ddp_reference()
    assert ddp is not None, "its backward is running"
    ddp.process_group.allreduce([bucket.buffer()]).wait()
    bucket.buffer().div_(ddp.process_group.size())
    stepped = []
    for param, average in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if not hasattr(param, "_in_backward_optimizers"):
            continue
        if not ddp.gradient_as_bucket_view:
            param.grad = average
        for optimizer in param._in_backward_optimizers:
            optimizer.step()
        stepped.append(param)

    def drop_gradients() -> None:
        for param in stepped:
            param.grad = None

    autograd.call_at_end_of_backward(drop_gradients)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
