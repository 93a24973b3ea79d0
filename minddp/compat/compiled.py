"""torch.compile: dynamo sees the wrapped module, splits its graph at the buckets, and skips minddp's own code.

- Dynamo must not trace minddp's frames, which communicate. It leaves out the files in its skip list, but compiles
  the functions that they call, such as the forward of the wrapped module.
- During that forward a data-parallel module is *active*. Dynamo asks torch's class for it, and splits the graph
  where a bucket is full (`DDPOptimizer`), so that the backward of each part ends with a bucket that can be
  launched.

With optimize_ddp="python_reducer", compiled autograd traces the backward into one graph, in which inductor buckets
the collectives. As in torch's class, each parameter then has a traceable hook, and the reducer is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minddp.options import MIB


def set_skipped(is_skipped: bool) -> None:
    """Add minddp's files to dynamo's skip list, or remove them for compiled autograd, which traces the wrapper."""
    from torch._dynamo import trace_rules

    package = Path(__file__).parent.parent
    folders = (*package.iterdir(), *(package / "tools").glob("*"))
    ours = [str(path) for path in folders if path.name not in ("tools", "tasks")]  # their models are compiled
    others = [path for path in trace_rules.SKIP_DIRS if path not in ours]
    trace_rules.SKIP_DIRS[:] = [*others, *ours] if is_skipped else others
    trace_rules._recompile_re()


def python_reducer_is_wanted() -> bool:
    from torch._dynamo.utils import get_optimize_ddp_mode

    return get_optimize_ddp_mode() == "python_reducer"


def take_over(ddp: Any) -> None:
    """Replace the reducer's hooks by traceable ones, and let inductor bucket their collectives."""
    torch._inductor.config._fuse_ddp_communication = True  # type: ignore[assignment]
    torch._inductor.config._fuse_ddp_bucket_size = ddp.bucket_bytes_cap // MIB  # type: ignore[assignment]
    ddp._reducer.hooks.remove()
    average = _averaging(ddp)
    ddp._accum_grad_hooks = [param.register_post_accumulate_grad_hook(average) for param in ddp._reducer.params]


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
