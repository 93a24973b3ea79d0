"""Jobs that end while the watchdog's threads are at work: with status 0, and without a message."""

from __future__ import annotations

import pytest

from tests.tools.watchdog.short_jobs import ENDS, LAUNCHERS, fault_of


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_ends_quietly(launcher: str, end: str) -> None:
    assert fault_of(launcher, end) == ""
