"""minddp: PyTorch's DistributedDataParallel, written again from nothing in readable Python.

    import minddp
    ddp = minddp.DistributedDataParallel(model)   # instead of torch.nn.parallel.DistributedDataParallel

`README.md` has the map of the code: which file answers which question.
"""

import importlib
from typing import Any

from minddp.compat.surface import DistributedDataParallel
from minddp.core.plan import BucketPlan, BucketSpec, ParamSpec, Slot

__all__ = [
    "BucketPlan",
    "BucketSpec",
    "DistributedDataParallel",
    "ParamSpec",
    "Slot",
    "install",
    "register",
    "unregister",
    "xray",
]

# What many programs never ask for, and the module that has it.
ON_DEMAND = {
    "install": "minddp.compat.install",
    "register": "minddp.compat.install",
    "unregister": "minddp.compat.install",
}


def __getattr__(name: str) -> Any:
    if name == "xray":  # a package that can be called: `with minddp.xray(ddp) as x:`
        return importlib.import_module("minddp.xray")
    if name not in ON_DEMAND:
        raise AttributeError(f"module 'minddp' has no attribute {name!r}")
    return getattr(importlib.import_module(ON_DEMAND[name]), name)
