"""What a file of Python defines, by name. Pages refer to code by these names, which tests look up."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def definitions(text: str) -> dict[str, ast.stmt]:
    """What a module defines, by dotted name: functions, classes and what is in them, and what is assigned."""
    return dict(_defined_in(ast.parse(text).body, ""))


def _defined_in(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _defined_in(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((prefix + target.id, node) for target in targets if isinstance(target, ast.Name))
