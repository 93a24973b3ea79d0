"""Put a class in the place of torch's DistributedDataParallel, in every module that holds it by name.

Or leave torch's, and give groups another backend than gloo. Done before any test module is imported, so that
whatever they import from torch is the class under test. Each construction of the class, or group of the backend,
is counted: a test that passes without having built any proves nothing about it.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any

NATIVE = "native"
BACKEND = "backend:"  # and its name: torch's class, with groups that ask for gloo given this backend


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


def put_in_place(subject: str) -> None:
    """Make torch's DDP the class `subject`, or leave it alone for `NATIVE`; count constructions of either.

    Of a `BACKEND`, the groups that it connects are counted.
    """
    from torch.nn.parallel.distributed import DistributedDataParallel as native

    is_backend = subject.startswith(BACKEND)
    chosen = native if subject == NATIVE or is_backend else resolve(subject)
    if chosen is not native:
        _replace(native, chosen)
    if is_backend:
        _give_backend(subject.removeprefix(BACKEND))
    else:
        _count_constructions(chosen)


def _give_backend(name: str) -> None:
    from torch.distributed import distributed_c10d as c10d

    if name != "gloo":
        from minddp.tools.launch import backend

        backend.install()
    make: Any = c10d._new_process_group_helper  # type: ignore[attr-defined]

    def make_and_count(*args: Any, **kwargs: Any) -> Any:
        group, store = make(*args, **kwargs)
        if getattr(group, "shares_memory", name == "gloo"):
            count_construction()
        return group, store

    c10d._new_process_group_helper = make_and_count  # type: ignore[attr-defined]


def _replace(native: type, chosen: type) -> None:
    """Rebind every module attribute that is `native`, but for those in the package of `chosen`."""
    own_package = chosen.__module__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == own_package:
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is native:
                setattr(module, attribute, chosen)


def _count_constructions(chosen: Any) -> None:
    original = chosen.__init__

    @functools.wraps(original)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        count_construction()
        original(self, *args, **kwargs)

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
