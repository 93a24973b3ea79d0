"""torch.compile: dynamo sees the wrapped module, splits its graph at the buckets, and skips minddp's own code.

- Dynamo must not trace minddp's frames, which communicate. It leaves out the files in its skip list, but compiles
  the functions that they call, such as the forward of the wrapped module.
- During that forward a data-parallel module is *active*. Dynamo asks torch's class for it, and splits the graph
  where a bucket is full (`DDPOptimizer`), so that the backward of each part ends with a bucket that can be
  launched.
"""

from __future__ import annotations

from pathlib import Path


def skip_our_files() -> None:
    """Add minddp's files to dynamo's skip list.

    Raises:
        RuntimeError: optimize_ddp="python_reducer", with which compiled autograd traces the reducer.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.utils import get_optimize_ddp_mode

    if get_optimize_ddp_mode() == "python_reducer":
        raise RuntimeError(
            'minddp has no traceable reducer for torch._dynamo.config.optimize_ddp = "python_reducer". Set it to '
            "True: the graph is split at the buckets, and minddp's reducer averages."
        )
    package = Path(__file__).parent.parent
    folders = (*package.iterdir(), *(package / "tools").glob("*"))
    ours = [str(path) for path in folders if path.name not in ("tools", "tasks")]  # their models are compiled
    trace_rules.SKIP_DIRS[:] = [*(path for path in trace_rules.SKIP_DIRS if path not in ours), *ours]
    trace_rules._recompile_re()
