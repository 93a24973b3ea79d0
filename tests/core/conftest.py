"""Every test of the core runs under the checks of `tests.reducer_state`; the count of states comes at the end."""

from __future__ import annotations

import pytest

from tests.reducer_state import StateWatch

LAST = "test_reducer_state.py"
WATCH = StateWatch()


@pytest.fixture(autouse=True)
def state_watch(monkeypatch: pytest.MonkeyPatch) -> StateWatch:
    """One watch for the whole folder: its `seen` grows from test to test."""
    WATCH.install(monkeypatch)
    return WATCH


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The test that counts states runs after those that make them."""
    items.sort(key=lambda item: item.path.name == LAST)
