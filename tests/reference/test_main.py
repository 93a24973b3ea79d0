"""`python -m reference`, as its reader runs it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from reference import ladder
from reference.ladder import RUNGS, Count, main
from reference.sharding import Held
from tests.processes import python


@pytest.mark.slow
def test_every_rung_has_the_oracles_gradients_and_a_row():
    rows = {line.split()[0]: line.split() for line in python("-m", "reference").splitlines()[2:-2]}
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
