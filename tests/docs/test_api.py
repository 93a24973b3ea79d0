"""docs/api.md has every public name, with all that a reader needs of it, and its examples run.

A section has one or several names in its heading. The page repeats no docstring: mkdocstrings shows
signature, docstring and source of what `:::` names.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import pytest

import minddp
from docs.site.recording import ROOT

PAGE = ROOT / "docs" / "api.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Section:
    names: tuple[str, ...]
    text: str

    @property
    def code(self) -> str:
        return "\n".join(BLOCK.findall(self.text))

    @property
    def shown(self) -> list[Any]:
        """The objects whose code mkdocstrings shows."""
        return [found(*path.rsplit(".", 1)) for path in re.findall(r"^::: (\S+)", self.text, re.MULTILINE)]


@cache
def sections() -> tuple[str, tuple[Section, ...]]:
    """The code that comes before each example, and the sections."""
    head, *rest = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    made = (Section(tuple(re.findall(r"`(\w+)`", text.partition("\n")[0])), text) for text in rest)
    return "\n".join(BLOCK.findall(head)), tuple(made)


def found(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def public() -> dict[str, Any]:
    """The names that minddp and its packages export, and those that the examples import from modules."""
    names = {name: getattr(minddp, name) for name in minddp.__all__}
    for package in [value for value in names.values() if isinstance(value, ModuleType)]:
        names |= {name: getattr(package, name) for name in package.__all__}
    for path in sorted((ROOT / "examples").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minddp"):
                names |= {alias.name: found(node.module or "", alias.name) for alias in node.names}
    return names


def members(it: Any) -> list[str]:
    """The public methods and properties that minddp defines in a class, and in those that it is derived from."""
    names = [
        name
        for cls in (inspect.getmro(it) if inspect.isclass(it) else ())
        if cls.__module__.startswith("minddp.") and not cls.__module__.startswith("minddp.compat.")
        for name, value in vars(cls).items()
        if not name.startswith("_")
        and name != "forward"
        and (callable(value) or isinstance(value, property | classmethod))
    ]
    return [*dict.fromkeys(names)]


def faults() -> Iterator[str]:
    """The names that the page lacks."""
    by_name = {name: section for section in sections()[1] for name in section.names}
    yield from (f"{name}: on the page, but not public" for name in by_name.keys() - public().keys())
    for name, it in public().items():
        section = by_name.get(name)
        if section is None:
            yield f"{name}: not on the page"
        else:
            yield from (f"{name}: {fault}" for fault in faults_of(name, it, section))


def faults_of(name: str, it: Any, section: Section) -> Iterator[str]:
    if callable(it) and not isinstance(it, ModuleType):
        classes = inspect.getmro(it) if inspect.isclass(it) else (it,)
        shown = [one for one in section.shown if one in classes]
        if not shown:
            yield "neither signature nor source are shown"
        yield from (f"{one.__qualname__} has no docstring" for one in shown if not inspect.getdoc(one))
    if "**Shapes, dtypes, units.**" not in section.text:
        yield "no shapes, dtypes, units"
    described = [section.text, *(inspect.getdoc(one) or "" for one in section.shown)]
    if not re.search(r"^Raises:|^\*\*Errors\.\*\*", "\n".join(described), re.MULTILINE):
        yield "no errors"
    files = re.findall(r"^Example: \[.*\]\((.*)\)", section.text, re.MULTILINE)
    example = section.code + "".join((PAGE.parent / file).read_text() for file in files)
    if not re.search(rf"\b{name}\b", example):
        yield "no example"
    if section.code:
        unused = (one for one in members(it) if not re.search(rf"\b{one}\b", section.code))
        yield from (f"no example uses `{one}`" for one in unused)


WITH_CODE = [section for section in sections()[1] if section.code]


def test_every_public_name_has_signature_units_errors_source_and_an_example() -> None:
    assert list(faults()) == []


@pytest.mark.slow
@pytest.mark.parametrize("section", WITH_CODE, ids=lambda section: section.names[0])
def test_an_example_runs(section: Section) -> None:
    code = f"{sections()[0]}\n{section.code}"
    exec(compile(code, f"docs/api.md: {section.names[0]}", "exec"), {"__name__": "__main__"})
