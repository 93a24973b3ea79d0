"""Every test of the core runs under the checks of `tests.reducer_state`; their count comes at the end."""

from __future__ import annotations

import pytest

from tests.reducer_state import _watched_state  # noqa: F401

LAST = "test_reducer_state.py"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The test that counts states runs after those that make them."""
    items.sort(key=lambda item: item.path.name == LAST)
