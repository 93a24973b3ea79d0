"""Communication hooks that torch's wrapper brings along, as functions of (state, bucket).

The first two are written in C++ there (`torch/csrc/distributed/c10d/default_comm_hooks.cpp`); bits are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from minddp.comm_hooks import GradBucket
from minddp.core import autograd


def allreduce(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean, divided before it is summed."""
    return _sum(group, bucket.buffer().div_(group.size()))


def fp16_compress(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean, divided and summed in half precision."""
    half = bucket.buffer().to(torch.float16).div_(group.size())

    def decompress(done: Any) -> torch.Tensor:
        return bucket.buffer().copy_(done.value()[0])

    return _sum(group, half).then(decompress)


def _sum(group: dist.ProcessGroup, tensor: torch.Tensor) -> torch.futures.Future[Any]:
    return cast(torch.futures.Future[Any], group.allreduce([tensor]).get_future())


def builtin_hook(kind: dist.BuiltinCommHookType) -> Callable[[Any, GradBucket], torch._C.Future]:
    """
    Raises:
        TypeError: something else than a member of `dist.BuiltinCommHookType`.
    """
    hooks = {
        dist.BuiltinCommHookType.ALLREDUCE: allreduce,
        dist.BuiltinCommHookType.FP16_COMPRESS: fp16_compress,
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
    autograd.call_at_end_of_backward(partial(_drop_gradients, stepped))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _drop_gradients(params: Iterable[torch.Tensor]) -> None:
    for param in params:
        param.grad = None
