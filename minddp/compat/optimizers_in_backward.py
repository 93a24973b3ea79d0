"""`torch.distributed.optim._apply_optimizer_in_backward`: optimizers that belong to one parameter each.

As in torch, a communication hook reduces the buckets. Torch's hook also steps the optimizers; here a mode does.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from minddp.comm_hooks import GradBucket
from minddp.core.bucket import Bucket
from minddp.core.mode import Mode


def take_over_optimizers(ddp: Any) -> None:
    """Let `ddp` step the optimizers, if there are any, instead of torch's hooks on the parameters."""
    params = [param for param in ddp._module_parameters if hasattr(param, "_in_backward_optimizers")]
    if params:
        from torch.distributed.optim import apply_optimizer_in_backward

        handles: Any = apply_optimizer_in_backward.param_to_optim_hook_handle_map
        for param in params:
            for handle in handles.get(param, ()):
                handle.remove()
        ddp.register_comm_hook(weakref.ref(ddp), apply_optim_in_backward_hook)
        ddp._reducer.modes.append(OptimizersInBackward())


def apply_optim_in_backward_hook(
    ddp_reference: weakref.ref[Any], bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Sum, then divide, as torch's hook of this name does."""
    ddp: Any = ddp_reference()
    num_ranks = ddp.process_group.size()
    if not ddp.gradient_as_bucket_view:
        for param in bucket.parameters():
            # As in torch: a parameter that no rank has used is stepped with zeros.
            if param.grad is None and hasattr(param, "_in_backward_optimizers"):
                param.grad = torch.zeros_like(param)
    return ddp.reducer._run_allreduce_hook(bucket).then(lambda done: done.value()[0].div_(num_ranks))


class OptimizersInBackward(Mode):
    """Steps the optimizers of a bucket's parameters, and drops these gradients at the end of backward, as torch."""

    def __init__(self) -> None:
        self._stepped: list[nn.Parameter] = []

    def after_unpack(self, bucket: Bucket) -> None:
        with torch.no_grad():
            for param in bucket.params:
                if optimizers := getattr(param, "_in_backward_optimizers", ()):
                    self._stepped.append(param)
                    for optimizer in optimizers:
                        optimizer.step()

    def post_backward(self) -> None:
        for param in self._stepped:
            param.grad = None
        self._stepped.clear()
