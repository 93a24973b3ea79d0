"""Putting minddp in the place of torch's class, in a Python process that is already running.

`from torch.nn.parallel import DistributedDataParallel` binds a name in the module that says so. For modules yet to
be imported it is enough to change what `torch.nn.parallel` offers; those that have bound the name already, such as
torch.distributed.checkpoint and Lightning's strategies, have to be changed one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType

from minddp.compat.recognition import TorchDDP, register
from minddp.compat.surface import DistributedDataParallel


def install() -> ExitStack:
    """Let every name of torch's DistributedDataParallel mean minddp's, and `register`.

    Changed is each global variable, of each module in `sys.modules` outside minddp, that is torch's class itself,
    whatever it is called: among them `torch.nn.parallel.DistributedDataParallel` and
    `torch.nn.parallel.distributed.DistributedDataParallel`, from which all later imports read.

    Not changed: instances that exist already; classes that were derived from torch's before the call, such as
    torch's own deprecated `DistributedDataParallelCPU`; references held elsewhere than in a module's globals
    (default arguments, closures, containers). For those that only ask `isinstance`, registration is enough.

    Returns:
        What undoes this call, by `.close()` or at the end of a `with` block: each changed variable means torch's
        class again, unless it has been assigned to since. A module that is first imported in between keeps
        minddp's. A second call while the first holds finds nothing to change, and so undoes nothing.
    """
    with ExitStack() as undo:
        undo.enter_context(register())
        for module, name in _bound_to_torch_ddp():
            setattr(module, name, DistributedDataParallel)
            undo.callback(_give_back, module, name)
        return undo.pop_all()


def _bound_to_torch_ddp() -> Iterator[tuple[ModuleType, str]]:
    """Every global variable outside minddp that is torch's class."""
    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] == "minddp" or not isinstance(module, ModuleType):
            continue
        # vars() and not getattr(): modules that import their parts on demand must not be made to.
        for name, value in list(vars(module).items()):
            if value is TorchDDP:
                yield module, name


def _give_back(module: ModuleType, name: str) -> None:
    if vars(module).get(name) is DistributedDataParallel:
        setattr(module, name, TorchDDP)
