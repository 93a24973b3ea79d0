"""Every test of the core runs under the checks of `tests.reducer_state`."""

from __future__ import annotations

import pytest

from tests.reducer_state import watch_reducers


@pytest.fixture(autouse=True)
def state_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_reducers(monkeypatch)
