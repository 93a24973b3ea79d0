"""Put a class in the place of torch's DistributedDataParallel, in every module that holds it by name.

Done before any test module is imported, so that whatever they import from torch is the class under test. Each
construction is counted: a test that passes without having built the class proves nothing about it.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any

NATIVE = "native"


def resolve(subject: str) -> type:
    """The class that `package.module:Class` names.

    Raises:
        ValueError: it is not of that form.
        ImportError, AttributeError: there is no such thing.
    """
    module, separator, name = subject.partition(":")
    if not (module and separator and name):
        raise ValueError(f"The class under test is given as package.module:Class, not as {subject!r}.")
    return getattr(importlib.import_module(module), name)


def put_in_place(subject: str, *, on_cpu: bool) -> None:
    """Make torch's DDP the class `subject`, or leave it alone for `NATIVE`; count constructions of either.

    With `on_cpu`, `device_ids` and `output_device` are not passed on: modules on the CPU must not have any.
    """
    from torch.nn.parallel.distributed import DistributedDataParallel as native

    chosen = native if subject == NATIVE else resolve(subject)
    if chosen is not native:
        _replace(native, chosen)
    _wrap_constructor(chosen, on_cpu=on_cpu)


def _replace(native: type, chosen: type) -> None:
    """Rebind every module attribute that is `native`, but for those in the package of `chosen`."""
    own_package = chosen.__module__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == own_package:
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is native:
                setattr(module, attribute, chosen)


def _wrap_constructor(chosen: Any, *, on_cpu: bool) -> None:
    original = chosen.__init__

    @functools.wraps(original)
    def constructor(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        count_construction()
        if on_cpu:
            device_ids = output_device = None
        original(self, module, device_ids, output_device, *args, **kwargs)

    chosen.__init__ = constructor


# ------------------------------------------------------------------ counting, across a test's processes

_TALLY = "MINDDP_CONFORMANCE_TALLY"


def start_tally(path: Path) -> None:
    """Count into this file, in this process and in those that it starts."""
    path.touch()
    os.environ[_TALLY] = str(path)


def count_construction() -> None:
    """One byte for each. Appending that is atomic: ranks need no lock, which a killed one might keep."""
    with open(os.environ[_TALLY], "ab", buffering=0) as tally:
        tally.write(b".")


def constructions() -> int:
    return Path(os.environ[_TALLY]).stat().st_size
