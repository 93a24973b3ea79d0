"""torch.compile: let it see the wrapped module, cut at the buckets, and nothing of minddp.

Dynamo compiles frame by frame. Two things it must be told, which it knows of torch's own class:

- The frames of minddp itself are not to be traced: they talk to processes. Dynamo leaves out files in its skip
  list, but still compiles what they call, which is the wrapped module's forward.
- While that forward runs, a data-parallel module is *active*. Dynamo asks torch's class for the active module
  and, if there is one, cuts the graph where a bucket is full (`DDPOptimizer`), so that each piece's backward
  ends with a bucket ready to leave. One graph for all would deliver every gradient at the very end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def active(module: Any) -> Iterator[None]:
    """Be the module that dynamo takes for the active data-parallel one. An inner one takes over for a while."""
    # `install` puts minddp's class in the place of torch's, also for dynamo.
    asked: tuple[Any, ...] = (TorchDDP, type(module))
    before = [cls._active_ddp_module for cls in asked]
    for cls in asked:
        cls._active_ddp_module = module
    try:
        yield
    finally:
        for cls, value in zip(asked, before, strict=True):
            cls._active_ddp_module = value
