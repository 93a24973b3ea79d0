"""torch.compile: let it see the wrapped module, cut at the buckets, and nothing of minddp.

Dynamo compiles frame by frame. It has to learn two things that it knows of torch's own class:

- The frames of minddp itself are not to be traced: they talk to processes. Dynamo leaves out files in its skip
  list, but still compiles what they call, which is the wrapped module's forward.
- While that forward runs, a data-parallel module is *active*. Dynamo asks torch's class for the active module
  and, if there is one, cuts the graph where a bucket is full (`DDPOptimizer`), so that each piece's backward
  ends with a bucket ready to leave. One graph for all would deliver every gradient at the very end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minddp.compat.recognition import TorchDDP

_PACKAGE = "minddp"


def keep_dynamo_out() -> None:
    """Put minddp's files on dynamo's skip list. May be called often. Imports dynamo, as torch's class does."""
    from torch._dynamo import trace_rules

    here = str(Path(__file__).parent.parent)
    if not any(str(path).rstrip("/") == here for path in trace_rules.SKIP_DIRS):
        trace_rules.add(_PACKAGE)


def let_dynamo_in() -> None:
    """Take minddp's files off the skip list again: compiled autograd traces through the wrapper."""
    from torch._dynamo import trace_rules

    here = str(Path(__file__).parent.parent)
    trace_rules.SKIP_DIRS[:] = [path for path in trace_rules.SKIP_DIRS if str(path).rstrip("/") != here]
    trace_rules._recompile_re()


class active:
    """`with active(module)`: dynamo takes it for the active data-parallel one. An inner one takes over for a while.

    It is set on torch's class alone. Where `install` has put minddp's in its place, dynamo asks minddp's, which
    answers what torch's says: to set it on minddp's would invalidate Python's caches of all its methods twice in
    every forward.
    """

    def __init__(self, module: Any):
        self._module = module

    def __enter__(self) -> None:
        torch_ddp: Any = TorchDDP
        self._before = torch_ddp._active_ddp_module
        torch_ddp._active_ddp_module = self._module

    def __exit__(self, *_error: object) -> None:
        torch_ddp: Any = TorchDDP
        torch_ddp._active_ddp_module = self._before
