"""minddp: PyTorch's DistributedDataParallel, rewritten from scratch in readable Python.

    import minddp
    ddp = minddp.DistributedDataParallel(model)   # instead of torch.nn.parallel.DistributedDataParallel

`README.md` has the map of the code: which file answers which question.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minddp.core.plan import BucketPlan, BucketSpec, ParamSpec, Slot  # noqa: F401
    from minddp.platform.ranks import RankFailure, launch  # noqa: F401
    from minddp.tools.audit import audit  # noqa: F401
    from minddp.tools.watchdog.watch import watch  # noqa: F401
    from minddp.tools.wrapper import DistributedDataParallel  # noqa: F401

# Imported on demand: `minddp --help` and `minddp exec` need no torch.
ON_DEMAND = {
    "minddp.tools.wrapper": ["DistributedDataParallel"],
    "minddp.compat.install": ["install", "register"],
    "minddp.core.plan": ["BucketPlan", "BucketSpec", "ParamSpec", "Slot"],
    "minddp.platform.ranks": ["RankFailure", "launch"],
    "minddp.tools.audit": ["audit"],
    "minddp.tools.watchdog.watch": ["watch"],
}
PACKAGES = ["elastic", "xray"]  # the latter can be called: `with minddp.xray(ddp) as x:`
__all__ = [*PACKAGES, *(name for names in ON_DEMAND.values() for name in names)]


def __getattr__(name: str) -> Any:
    if name in PACKAGES:
        return importlib.import_module(f"minddp.{name}")
    for module, names in ON_DEMAND.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'minddp' has no attribute {name!r}")


# `import minddp` makes the backend "minddp" known to torch.distributed, unless it is the command line that imports
if os.path.basename(sys.argv[0]) not in ("minddp", "-m"):
    importlib.import_module("minddp.transport.backend").register()
