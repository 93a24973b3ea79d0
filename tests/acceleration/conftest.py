"""Every test of this folder runs under the checks of `tests.reducer_state`."""

from __future__ import annotations

import pytest

from tests.reducer_state import StateWatch


@pytest.fixture(autouse=True)
def _checked_state(monkeypatch: pytest.MonkeyPatch) -> None:
    StateWatch().install(monkeypatch)
