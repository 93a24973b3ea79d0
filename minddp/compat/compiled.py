"""torch.compile: let it see the wrapped module, cut at the buckets, and nothing of minddp.

Dynamo compiles frame by frame. It has to learn two things that it knows of torch's own class:

- The frames of minddp itself are not to be traced: they talk to processes. Dynamo leaves out files in its skip
  list, but still compiles what they call, which is the wrapped module's forward.
- While that forward runs, a data-parallel module is *active*. Dynamo asks torch's class for the active module
  and, if there is one, cuts the graph where a bucket is full (`DDPOptimizer`), so that each piece's backward
  ends with a bucket ready to leave. One graph for all would deliver every gradient at the very end.

[Note: a reducer that can be traced]
optimize_ddp="python_reducer": a reducer that compiled autograd can see through.

Compiled autograd traces the backward, hooks included, into one graph, and inductor then buckets and schedules the
collectives that it finds in there. So in this mode minddp's own reducer stands aside: each parameter gets a hook
that does the simplest thing there is, average this gradient, in operations that can be traced. As torch's class.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minddp.options import MIB


def set_skipped(is_skipped: bool) -> None:
    """Put minddp's files on dynamo's skip list, or take them off: compiled autograd traces through the wrapper."""
    from torch._dynamo import trace_rules

    package = Path(__file__).parent.parent
    folders = (*package.iterdir(), *(package / "tools").glob("*"))
    ours = [str(path) for path in folders if path.name not in ("tools", "tasks")]  # models are to be compiled
    others = [path for path in trace_rules.SKIP_DIRS if path not in ours]
    trace_rules.SKIP_DIRS[:] = [*others, *ours] if is_skipped else others
    trace_rules._recompile_re()


def python_reducer_is_wanted() -> bool:
    from torch._dynamo.utils import get_optimize_ddp_mode

    return get_optimize_ddp_mode() == "python_reducer"


def take_over(ddp: Any) -> None:
    """Replace the reducer's hooks by traceable ones, and configure inductor."""
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
