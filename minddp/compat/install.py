"""Putting minddp in the place of torch's class, in a Python process that is already running.

`from torch.nn.parallel import DistributedDataParallel` binds a name in the module that says so. For modules yet to
be imported it is enough to change what `torch.nn.parallel` offers; those that have bound the name already, such as
torch.distributed.checkpoint and Lightning's strategies, have to be changed one by one.

Frameworks ask `isinstance(ddp, DistributedDataParallel)` before they strip `module.` from a checkpoint, unwrap a
model or look for `no_sync`; see docs/frameworks.md. minddp's class is no subclass of torch's, but torch's is an
abstract class by its metaclass (it derives from `Joinable`), so minddp's can be registered as a virtual one.

[Note: taking a registration back]
Python has `ABCMeta.register` but nothing to undo it. An abstract class keeps a registry, and caches of the classes
that it has said yes and no to, those derived from minddp's among them. Both can be read and reset through functions
of `_abc`, from which `ABCMeta` itself is made. So both are emptied, and whatever else was registered is registered
again. `Joinable`, the abstract class above, has caches too, but nothing to forget: minddp's class really is one.
"""

from __future__ import annotations

import sys
from _abc import _get_dump, _reset_caches, _reset_registry
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType

from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

import minddp
from minddp.ddp import DistributedDataParallel as WrapperClass


def register() -> ExitStack:
    """Make minddp's class a virtual subclass of torch's. Returns what undoes this call, as `install` does."""
    undo = ExitStack()
    if not issubclass(WrapperClass, TorchDDP):
        TorchDDP.register(WrapperClass)
        undo.callback(unregister)
    return undo


def unregister() -> None:
    """Undo `register`; does nothing if it was not called. See [Note: taking a registration back]."""
    registered = [reference() for reference in _get_dump(TorchDDP)[0]]  # weak references
    _reset_registry(TorchDDP)
    _reset_caches(TorchDDP)
    for other in registered:
        if other is not None and other is not WrapperClass:
            TorchDDP.register(other)


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
        for module, name in bound_to(TorchDDP):
            setattr(module, name, minddp.DistributedDataParallel)
            undo.callback(_give_back, module, name)
        return undo.pop_all()


def bound_to(it: object) -> Iterator[tuple[ModuleType, str]]:
    """Every global variable outside minddp that is torch's class, or function."""
    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] == "minddp" or not isinstance(module, ModuleType):
            continue
        # vars() and not getattr(): modules that import their parts on demand must not be made to.
        for name, value in list(vars(module).items()):
            if value is it:
                yield module, name


def _give_back(module: ModuleType, name: str) -> None:
    if vars(module).get(name) is minddp.DistributedDataParallel:
        setattr(module, name, TorchDDP)
