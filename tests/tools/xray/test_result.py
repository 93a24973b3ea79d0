from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from minddp.core.plan import plan_from_registration
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.chrome_trace import trace_events
from minddp.tools.xray.result import Result, load
from tests.tools.xray.made_up import Rank, layout, recording

MADE = recording([Rank(), Rank(late_ms=1)], layout([[1], [1]]))


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step\.pdf.*must be one of \.html, \.json"):
        Result(MADE).save(tmp_path / "step.pdf")


def test_without_a_step_nothing_is_written_and_it_is_said_what_to_do(tmp_path: Path) -> None:
    empty = replace(MADE, ranks=(replace(MADE.ranks[0], events=()),))
    with pytest.raises(ValueError, match=r"No whole step was recorded.*at least one whole step"):
        Result(empty).save(tmp_path / "step.html")
    assert list(tmp_path.iterdir()) == []


def test_what_was_saved_is_loaded_again_and_nothing_else(tmp_path: Path) -> None:
    made = replace(MADE, notes=("a note",), has_plan=False)
    Result(made).save(path := tmp_path / "step.json")
    assert load(path).recording == made
    saved = json.loads(path.read_text())
    assert saved["traceEvents"] == trace_events(Analysis(made))
    path.write_text(json.dumps({"minddp": {**saved["minddp"], "format": 99}}))
    with pytest.raises(ValueError, match=r"of format 99, but this minddp reads format \d+; record it again"):
        load(path)
    for content in ("{}", '{"minddp": []}'):
        path.write_text(content)
        with pytest.raises(ValueError, match="holds no recording"):
            load(path)


def test_a_plan_that_the_planner_made_is_loaded_but_for_its_capacities(tmp_path: Path) -> None:
    plan = plan_from_registration(layout([[1, 2], [3]]).params, [2**20])
    Result(recording([Rank()], plan)).save(tmp_path / "step.json")
    found = load(tmp_path / "step.json").recording.ranks[0].plan
    assert [found.names(b) for b in range(len(found.buckets))] == [plan.names(b) for b in range(len(plan.buckets))]
    assert (found.params, found.nbytes, found.origin) == (plan.params, plan.nbytes, plan.origin)


def test_only_the_first_rank_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = Result(MADE, is_first=False)
    elsewhere.save(tmp_path / "step.html")
    elsewhere.explain()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""
