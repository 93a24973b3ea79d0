"""`python -m reference`, as its reader runs it."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from reference.__main__ import beyond, main
from reference.ladder import Measurement, rungs

ROOT = Path(__file__).parents[2]


def measurement(rung: str, difference: float) -> Measurement:
    return Measurement(rung, 1, 1, 1, 0.0, difference)


def test_every_rung_has_the_oracles_gradients():
    command = [sys.executable, "-m", "reference", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = {line.split("│")[1].strip(): line.split("│") for line in done.stdout.splitlines() if "│" in line}
    assert [*rows] == [*rungs(0)]
    assert all(float(row[-2]) == 0 for row in rows.values())


def test_a_rung_is_wrong_beyond_the_tolerance_and_if_it_is_not_a_number():
    measurements = [measurement("good", 0.5), measurement("bad", 1.5), measurement("nan", math.nan)]
    assert beyond(1.0, measurements) == ["bad", "nan"]


@pytest.mark.parametrize(("ranks", "rounds"), [(0, 1), (2, 0)])
def test_bad_numbers_are_refused(ranks, rounds):
    with pytest.raises(SystemExit, match="must be 1 or more"):
        main(ranks, rounds)
