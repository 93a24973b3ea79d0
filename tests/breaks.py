"""Changed source in place of the code of functions that exist, without another import."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any


class StaleBreak(AssertionError):
    """The text that a `Break` replaces is not in the source, or not only once."""


@dataclass(frozen=True)
class Break:
    """A fault put into minddp/`file`: `old` is replaced by `new`."""

    name: str
    file: str
    old: str
    new: str

    def applied_to(self, source: str) -> str:
        """The changed source.

        Raises:
            StaleBreak: `old` does not occur exactly once.
        """
        if source.count(self.old) != 1:
            raise StaleBreak(
                f"Break `{self.name}` replaces text that occurs {source.count(self.old)} times in "
                f"minddp/{self.file}, not once:\n{self.old}\nBring it up to date with the source."
            )
        return source.replace(self.old, self.new)


def apply(change: Break) -> Callable[[], None]:
    """Give the functions of the module the code of its changed source. Returns a function that undoes this.

    Raises:
        StaleBreak: the text that a `Break` replaces is not in the source.
        ValueError: no function changes, or one that has other free variables then.
    """
    module = importlib.import_module("minddp." + change.file.removesuffix(".py").replace("/", "."))
    file = inspect.getsourcefile(module)
    assert file is not None
    source = Path(file).read_text()
    before, after = compile(source, file, "exec"), compile(change.applied_to(source), file, "exec")
    old, new = dict(_functions_in(before)), dict(_functions_in(after))
    changed = [path for path in new if path in old and _differ(old[path], new[path])]
    if old.keys() != new.keys() or not changed:
        raise ValueError(f"`{change}` changes no function")
    codes = [(function := _function_at(module, path), function.__code__) for path in changed]
    for (function, _), path in zip(codes, changed, strict=True):
        function.__code__ = new[path]

    def undo() -> None:
        for function, code in codes:
            function.__code__ = code

    return undo


def _functions_in(code: CodeType, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], CodeType]]:
    """The code of functions and methods, by name; not of functions within functions, which belong to those."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and not constant.co_name.startswith("<"):
            if constant.co_flags & inspect.CO_OPTIMIZED:  # class bodies are not
                yield (*path, constant.co_name), constant
            else:
                yield from _functions_in(constant, (*path, constant.co_name))


def _differ(one: CodeType, other: CodeType) -> bool:
    """True if they do something else; lines may have moved."""
    constants = [[c for c in code.co_consts if not isinstance(c, CodeType)] for code in (one, other)]
    inner = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (one, other)]
    return (
        one.co_code != other.co_code
        or one.co_names != other.co_names
        or repr(constants[0]) != repr(constants[1])
        or len(inner[0]) != len(inner[1])
        or any(map(_differ, *inner))
    )


def _function_at(module: Any, path: tuple[str, ...]) -> FunctionType:
    found: Any = module
    for name in path:
        found = vars(found)[name]
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, functools.cached_property):
        found = found.func
    return inspect.unwrap(getattr(found, "__func__", found))
