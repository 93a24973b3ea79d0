"""docs/frameworks.md: the tests that it names exist, and none that compares a framework is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent.parent / "docs" / "frameworks.md"


def named_on_the_page() -> set[tuple[str, str]]:
    """(file, test): in each row of the table, the tests named after a link to their file."""
    named = set()
    for row in PAGE.read_text().splitlines():
        _, link, after = row.partition("](../tests/compat/")
        if link:
            file, _, tests = after.partition(")")
            named |= {(file, test) for test in re.findall(r"`(test_\w+)`", tests)}
    return named


def named_in(path: Path) -> set[tuple[str, str]]:
    body = ast.parse(path.read_text()).body
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return {(path.name, name) for name in functions if name.startswith("test_")}


def test_every_test_on_the_page_exists() -> None:
    named = named_on_the_page()
    assert len(named) > 10
    existing = set().union(*(named_in(TESTS / file) for file, _ in named))
    assert named <= existing


def test_every_comparison_is_on_the_page() -> None:
    comparing = [path for path in TESTS.glob("test_*.py") if re.search(r"\n +expect_same_bits", path.read_text())]
    assert comparing
    assert set().union(*map(named_in, comparing)) <= named_on_the_page()
