"""Scripts that the search has found, shrunk."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.mid_training.script import Line, Script
from tests.mid_training.search import Search
from tests.parity.scenario import Options
from tests.ranks import RankPool

FAULTS = {
    "a backward on one weight is taken for the one that forward expects, and that of the loss stays local": Script(
        0,
        2,
        "process_group",
        ("large",),
        Options(find_unused_parameters=True),
        calm_steps=0,
        lines=(Line("backward_outside", (0, "between")),),
    ),
    "a backward that failed is taken up by one of another wrapper that shares a layer": Script(
        93,
        2,
        "process_group",
        ("half_frozen", "transposed"),
        Options(),
        calm_steps=0,
        lines=(Line("fail", ("backward", 2)), Line("share", (0,))),
    ),
    "gradients come back that were cleared after an error for missing ones": Script(
        86,
        2,
        "process_group",
        ("half_frozen",),
        Options(),
        calm_steps=0,
        goes_on=True,
        lines=(Line("drop", (0,)), Line("train"), Line("backward_outside", (0, "before"))),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_was_found_is_fixed(fault: str, pools: Callable[[int], RankPool]) -> None:
    assert Search(pools).play(FAULTS[fault]) is None
