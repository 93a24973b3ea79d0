"""Which tests of a module are about DDP: those whose source refers, name by name, to it.

That is a guess from the text, which may include too many. A test that passes natively without building a DDP
module is left out of the comparison.
"""

from __future__ import annotations

import ast
import sys
import unittest
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from tests.conformance.selection import Suite, TestId

DDP = frozenset({"DistributedDataParallel", "DDP", "replicate"})


def tests_of_ddp(module: ModuleType, suite: Suite) -> list[TestId]:
    """The tests in `module` that may build a DDP module; `suite.sources` must have been imported."""
    sources = [Path(sys.modules[name].__file__ or "").read_text() for name in suite.sources]
    about_ddp = leading_to(DDP, sources)
    return [test for test in tests_in(module, suite) if _is_generated_from(test.method, about_ddp)]


def tests_in(module: ModuleType, suite: Suite) -> Iterator[TestId]:
    """All tests of the unittest classes that are attributes of `module`."""
    for name, member in sorted(vars(module).items()):
        if isinstance(member, type) and issubclass(member, unittest.TestCase):
            for method in unittest.defaultTestLoader.getTestCaseNames(member):
                yield TestId(suite.name, f"{name}.{method}")


def leading_to(goals: frozenset[str], sources: Iterable[str]) -> set[str]:
    """Names of test functions that mention one of `goals`, or a function or class that does, and so on."""
    mentions = _mentions(sources)
    leading = set(goals)
    while more := {name for name, mentioned in mentions.items() if name not in leading and mentioned & leading}:
        leading |= more
    return {name for name in leading if name.startswith("test")}


def _mentions(sources: Iterable[str]) -> dict[str, set[str]]:
    """For each name that a function or class is defined by, all names that occur in the definition.

    A class does not count for mentioning what only its tests mention: nearly every class of tests would.
    """
    mentions: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                mentions[node.name] |= set(_names(node))
            elif isinstance(node, ast.ClassDef):
                rest = [part for part in node.body if not _is_test(part)]
                mentions[node.name] |= {name for part in (*rest, *node.bases) for name in _names(part)}
    return mentions


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _is_test(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test")


def _is_generated_from(method: str, names: set[str]) -> bool:
    """True if `method` is one of `names`, or one of them with parameters appended."""
    words = method.split("_")
    return any("_".join(words[:count]) in names for count in range(1, len(words) + 1))
