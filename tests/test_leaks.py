"""What many wrappers, one after the other in one process, leave behind in it: nothing. See `leaks.py`."""

from __future__ import annotations

import pytest

from tests.leaks import TRANSPORTS, growth_of_modes

COUNT = 25


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_wrappers_that_are_gone_leave_nothing_behind(transport: str) -> None:
    for mode, of_rank in growth_of_modes(transport, COUNT):
        assert of_rank == [{}, {}], f"{mode} over {transport}"
