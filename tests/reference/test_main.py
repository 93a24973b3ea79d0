"""`python -m reference`, as its reader runs it."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from reference import ladder
from reference.ladder import RUNGS, Count, main
from reference.sharding import Held

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reference", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_every_rung_has_the_oracles_gradients_and_a_row():
    done = run()
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()[2:-2]}
    assert [*rows] == [*RUNGS]
    assert {row[-1] for row in rows.values()} == {"yes"}
    assert [rows[name][1:3] for name in ("naive", "flat", "overlapped")] == [["24", "0"], ["1", "0"], ["24", "24"]]


def test_a_difference_is_wrong_beyond_the_tolerance_and_if_it_is_not_a_number():
    good = Count("good", 1, 1, 1, Held(1, 1, 1), 3, difference=ladder.TOLERANCE)
    assert good.is_equal
    assert not replace(good, difference=2 * ladder.TOLERANCE).is_equal
    assert not replace(good, difference=math.nan).is_equal


def test_one_rank_is_refused():
    with pytest.raises(SystemExit, match="Choose 2 or more"):
        main(ranks=1)
