"""optimize_ddp="python_reducer": a reducer that compiled autograd can see through.

Compiled autograd traces the backward, hooks included, into one graph, and inductor then buckets and schedules the
collectives that it finds in there. So in this mode minddp's own reducer stands aside: each parameter gets a hook
that does the simplest thing there is, average this gradient, in operations that can be traced. As torch's class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from minddp.compat import compiled

MIB = 1024 * 1024


def is_wanted() -> bool:
    """True if dynamo's configuration asks for it. Torch's constructor looks at the same setting."""
    from torch._dynamo.utils import get_optimize_ddp_mode

    return get_optimize_ddp_mode() == "python_reducer"


def take_over(ddp: Any) -> None:
    """Replace the reducer's hooks by traceable ones, and configure dynamo and inductor."""
    compiled.let_dynamo_in()
    torch._inductor.config._fuse_ddp_communication = True  # type: ignore[assignment]
    torch._inductor.config._fuse_ddp_bucket_size = ddp.bucket_bytes_cap // MIB  # type: ignore[assignment]
    ddp._reducer.hooks.remove()
    ddp._accum_grad_hooks = [
        param.register_post_accumulate_grad_hook(_averaging(ddp)) for param in ddp._reducer.params
    ]


def _averaging(ddp: Any) -> Callable[[nn.Parameter], None]:
    import torch.distributed._functional_collectives as functional

    def average(param: Any) -> None:
        if not ddp.require_backward_grad_sync or param.grad is None:
            return
        if ddp._comm_hooks:
            for hook, state in ddp._comm_hooks:
                hook(state, (param.grad, param))
        else:
            mean = param.grad / ddp.process_group.size()
            param.grad.copy_(functional.all_reduce(mean, "sum", ddp.process_group))

    return average
