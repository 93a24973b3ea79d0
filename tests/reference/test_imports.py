"""`reference` and `minddp` never import each other: each is the oracle of the other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imported_modules(tree: ast.AST, package: str) -> Iterator[str]:
    """Full names of the modules a file of `package` imports, by statement or by name given as a constant."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, level=0):
                yield module or ""
            case ast.ImportFrom(module=module, level=level):
                parent = package.split(".")[: len(package.split(".")) - level + 1]
                yield ".".join([*parent, *([module] if module else [])])
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def files_that_import(importer: str, imported: str) -> list[str]:
    """`file: module` for each import of `imported`, or of anything below it, in the package `importer`."""
    found = []
    for path in sorted((ROOT / importer).rglob("*.py")):
        package = ".".join(path.relative_to(ROOT).parent.parts)
        for module in imported_modules(ast.parse(path.read_text()), package):
            if module.split(".")[0] == imported:
                found.append(f"{path.relative_to(ROOT)}: {module}")
    return found


def test_reference_never_imports_minddp():
    assert files_that_import("reference", "minddp") == []


def test_minddp_never_imports_reference():
    assert files_that_import("minddp", "reference") == []


def test_the_search_sees_the_packages_it_searches():
    assert files_that_import("reference", "torch") != []
    assert "reference/flat.py: reference.interface" in files_that_import("reference", "reference")


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import minddp.core.plan as p", "minddp.core.plan"),
        ("def f():\n    from minddp import plan", "minddp"),
        ("from . import plan", "pkg.sub"),
        ("from ..other import x", "pkg.other"),
        ("import importlib; importlib.import_module('minddp.ddp')", "minddp.ddp"),
        ("__import__('minddp')", "minddp"),
    ],
)
def test_the_search_finds_every_way_to_import(source, module):
    assert module in imported_modules(ast.parse(source), package="pkg.sub")
