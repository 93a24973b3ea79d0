"""Putting minddp's class in the place of torch's, in a running Python process.

For modules that are imported later it is enough to change `torch.nn.parallel`. Modules that have bound the name
already, such as Lightning's strategies, have to be changed one by one.

Frameworks check `isinstance(ddp, DistributedDataParallel)` before they strip `module.` from a checkpoint, unwrap a
model or use `no_sync`. Torch's class is an abstract class by its metaclass (it derives from `Joinable`), so
minddp's can be registered as a virtual subclass.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import ModuleType

from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

import minddp
from minddp.ddp import DistributedDataParallel as WrapperClass


def register() -> None:
    """Make minddp's class a virtual subclass of torch's, for good: Python cannot undo a registration."""
    TorchDDP.register(WrapperClass)


def install() -> ExitStack:
    """Replace torch's DistributedDataParallel by minddp's under all its names, and `register`.

    This changes each global variable, under any name, that is torch's class, in each module in `sys.modules`
    outside of minddp. It does not change existing instances, classes that were derived from torch's before, and
    references in default arguments, closures and containers.

    Returns:
        An object that gives the changed variables torch's class again, by `.close()` or at the end of a `with`
        block. A module that is first imported in between keeps minddp's class, and the registration stays.
    """
    register()
    undo = ExitStack()
    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] == "minddp" or not isinstance(module, ModuleType):
            continue
        # Not by getattr(), which would import the parts of lazily importing modules.
        for name, value in list(vars(module).items()):
            if value is TorchDDP:
                setattr(module, name, minddp.DistributedDataParallel)
                undo.callback(setattr, module, name, TorchDDP)
    return undo
