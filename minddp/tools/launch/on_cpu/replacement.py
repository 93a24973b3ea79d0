"""Replaces functions of torch, and tells the user about it."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.jit import _builtins

Function = Callable[..., Any]


class Wrap(NamedTuple):
    """Replaces a function by `make(function)`, which gets its name and signature."""

    make: Callable[[Any], Function]


def replace(owner: Any, table: Mapping[str, Any]) -> None:
    """Set attributes of `owner` for the rest of this process.

    A key is one name or several. Names that this torch lacks are skipped. The module that defines a function gets
    the new one, too, and so does torch.jit, which knows functions by identity.
    """
    for names, new in table.items():
        for name in names.split():
            old = getattr(owner, name, None)
            if old is None:
                continue
            value = functools.wraps(old)(new.make(old)) if isinstance(new, Wrap) else new
            setattr(owner, name, value)
            home = sys.modules.get(getattr(old, "__module__", None) or "")
            if home not in (None, torch._C) and vars(home).get(name) is old:
                setattr(home, name, value)
            if builtin := _builtins._find_builtin(old):
                _builtins._register_builtin(value, builtin)


def always(value: Any) -> Function:
    return lambda *args, **kwargs: value


def with_arguments(**changes: Function) -> Wrap:
    """Changes arguments, given or default, by `changes[name](argument)`; of a builtin, only keyword arguments."""

    def make(function: Function) -> Function:
        try:
            signature = inspect.signature(function)
        except ValueError:
            signature = inspect.signature(always(None))

        def changed(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            for arguments in (bound.arguments, bound.arguments.get("kwargs", {})):
                for name in changes.keys() & arguments.keys():
                    arguments[name] = changes[name](arguments[name])
            return function(*bound.args, **bound.kwargs)

        return changed

    return Wrap(make)


@functools.cache
def say_once(text: str) -> None:
    """One line on rank 0's stderr, once per process."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if rank == 0:
        print(f"minddp --on-cpu: {text}", file=sys.stderr)
