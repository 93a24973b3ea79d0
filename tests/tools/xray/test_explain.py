from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.timeline import Activity
from minddp.tools.xray.words import explain
from tests.tools.xray.made_up import Rank, layout, recording


def printed(analysis: Analysis, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    explain(analysis, console)
    return console.file.getvalue()


def test_the_table_adds_up() -> None:
    text = printed(Analysis(recording([Rank(), Rank(late_ms=2)], layout([[1], [2]]), steps=2)))
    found = re.findall(r"^(\w.*?) {2,}([\d.]+) ms +([\d.]+) ms *$", text, re.MULTILINE)
    rows = {label: list(map(float, times)) for label, *times in found}
    parts = [activity.value for activity in Activity if activity.value in rows]
    assert len(parts) == 7
    assert {"between forward and backward", "blocked in communication", "copy averages to .grad"} < set(parts)
    sums = [sum(rows[name][k] for name in parts) for k in range(2)]
    assert sums == pytest.approx(rows["step"], abs=0.05)
    assert "\n1. " in text
    assert "This is step 0, the median of 2 steps." in text


def test_it_fits_a_terminal_of_80_columns() -> None:
    assert max(map(len, printed(Analysis(recording([Rank()] * 3, layout([[1]])))).splitlines())) <= 80


def test_many_ranks_are_cut_short_and_that_is_said() -> None:
    assert "And 2 more" in printed(Analysis(recording([Rank()] * 10, layout([[1]]))), width=200)
