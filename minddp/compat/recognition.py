"""Being recognised: `isinstance(ddp, torch.nn.parallel.DistributedDataParallel)` holds for minddp's class.

Frameworks ask just that before they strip `module.` from a checkpoint, unwrap a model or look for `no_sync`; see
docs/frameworks.md. minddp's class is no subclass of torch's, but torch's is an abstract class by its metaclass (it
derives from `Joinable`), so minddp's can be registered as a virtual one.

[Note: taking a registration back]
Python has `ABCMeta.register` but nothing to undo it. An abstract class keeps a registry, and caches of the classes
that it has said yes and no to, those derived from minddp's among them. Both can be read and reset through functions
of `_abc`, of which `ABCMeta` itself is made. So both are emptied, and whatever else was registered is registered
again. `Joinable`, the abstract class above, has caches too, but nothing to forget: minddp's class really is one.
"""

from __future__ import annotations

from _abc import _get_dump, _reset_caches, _reset_registry
from contextlib import ExitStack

from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from minddp.ddp import DistributedDataParallel


def register() -> ExitStack:
    """Make minddp's class a virtual subclass of torch's.

    Returns:
        What undoes this call, by `.close()` or at the end of a `with` block. A second call while the first holds
        changes nothing, and so undoes nothing.
    """
    undo = ExitStack()
    if not issubclass(DistributedDataParallel, TorchDDP):
        TorchDDP.register(DistributedDataParallel)
        undo.callback(unregister)
    return undo


def unregister() -> None:
    """Undo `register`; does nothing if it was not called. See [Note: taking a registration back]."""
    registered = [reference() for reference in _get_dump(TorchDDP)[0]]  # weak references
    _reset_registry(TorchDDP)
    _reset_caches(TorchDDP)
    for other in registered:
        if other is not None and other is not DistributedDataParallel:
            TorchDDP.register(other)
