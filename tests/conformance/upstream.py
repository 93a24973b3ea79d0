"""The tests of DDP in a checkout of PyTorch, which the wheel does not contain: files under `test/distributed`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.conformance.selection import Suite, both_ways

_MENTIONS_DDP = re.compile(r"\bDistributedDataParallel\b|\breplicate\(")


def suites_in(path: Path) -> list[Suite]:
    """Two suites for every test file that mentions DDP, as it is and on the CPU.

    `path` is the root of a checkout, or one of its test files.

    Raises:
        FileNotFoundError: there are no such files.
    """
    path = path.resolve()
    candidates = [path] if path.is_file() else sorted((path / "test" / "distributed").rglob("test_*.py"))
    files = [file for file in candidates if _MENTIONS_DDP.search(file.read_text())]
    if not files:
        raise FileNotFoundError(
            f"No tests of DDP at {path}: --upstream takes the root of a PyTorch checkout, or test files in it."
        )
    return [suite for file in files for suite in _suites_of(file)]


def _suites_of(file: Path) -> tuple[Suite, Suite]:
    """Test files import their neighbours, and those in `test/distributed`, by bare names."""
    root = next((folder for folder in file.parents if folder.name == "distributed"), file.parent)
    folders = tuple(dict.fromkeys((str(file.parent), str(root))))
    neighbours = {name for name in _imported(file) if any((Path(f) / f"{name}.py").exists() for f in folders)}
    name = ".".join(file.relative_to(root).with_suffix("").parts)
    return both_ways(name, file.stem, (file.stem, *sorted(neighbours)), folders)


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
