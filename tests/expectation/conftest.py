"""Tests of this folder run under the checks of `tests.reducer_state`."""

from __future__ import annotations

from tests.reducer_state import _watched_state  # noqa: F401
