"""Putting minddp's class in the place of torch's, in a running Python process.

`from torch.nn.parallel import DistributedDataParallel` binds a name in the importing module. For modules that are
imported later it is enough to change `torch.nn.parallel`. Modules that have bound the name already, such as
torch.distributed.checkpoint and Lightning's strategies, have to be changed one by one.

Frameworks check `isinstance(ddp, DistributedDataParallel)` before they strip `module.` from a checkpoint, unwrap a
model or use `no_sync`; see docs/frameworks.md. minddp's class does not derive from torch's. But torch's is an
abstract class by its metaclass (it derives from `Joinable`), so minddp's can be registered as a virtual subclass.
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
    """Make minddp's class a virtual subclass of torch's. The result undoes this call, as that of `install` does."""
    undo = ExitStack()
    if not issubclass(WrapperClass, TorchDDP):
        TorchDDP.register(WrapperClass)
        undo.callback(unregister)
    return undo


def unregister() -> None:
    """Undo `register`; does nothing if it was not called.

    Python can undo a registration only by emptying the registry and the caches of the abstract class, through the
    functions of `_abc` from which `ABCMeta` is made. Other registered classes are registered again. `Joinable` has
    caches, too, but they stay valid: minddp's class derives from it.
    """
    registered = [reference() for reference in _get_dump(TorchDDP)[0]]  # weak references
    _reset_registry(TorchDDP)
    _reset_caches(TorchDDP)
    for other in registered:
        if other is not None and other is not WrapperClass:
            TorchDDP.register(other)


def install() -> ExitStack:
    """Replace torch's DistributedDataParallel by minddp's under all its names, and `register`.

    This changes each global variable, under any name, that is torch's class, in each module in `sys.modules`
    outside of minddp. Among them are `torch.nn.parallel.DistributedDataParallel` and
    `torch.nn.parallel.distributed.DistributedDataParallel`, which later imports read.

    It does not change existing instances; classes that were derived from torch's before the call, such as torch's
    own deprecated `DistributedDataParallelCPU`; references in default arguments, closures and containers. Code with
    such references that only checks `isinstance` works with the registration.

    Returns:
        An object that undoes this call, by `.close()` or at the end of a `with` block: each changed variable is
        torch's class again, unless it has been assigned to since. A module that is first imported in between keeps
        minddp's class. A second call while the first one is in effect changes nothing, and undoes nothing.
    """
    with ExitStack() as undo:
        undo.enter_context(register())
        for module, name in bound_to(TorchDDP):
            setattr(module, name, minddp.DistributedDataParallel)
            undo.callback(_restore, module, name)
        return undo.pop_all()


def bound_to(it: object) -> Iterator[tuple[ModuleType, str]]:
    """All global variables outside of minddp whose value is `it`."""
    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] == "minddp" or not isinstance(module, ModuleType):
            continue
        # Not by getattr(), which would import the parts of lazily importing modules.
        for name, value in list(vars(module).items()):
            if value is it:
                yield module, name


def _restore(module: ModuleType, name: str) -> None:
    if vars(module).get(name) is minddp.DistributedDataParallel:
        setattr(module, name, TorchDDP)
