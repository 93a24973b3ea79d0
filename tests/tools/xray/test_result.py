from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from minddp.tools.xray.result import Result, load
from tests.tools.xray.made_up import Rank, layout, recording

MADE = recording([Rank(), Rank(late_ms=1)], layout([[1], [1]]))


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step\.pdf.*must be one of \.html, \.json"):
        Result(MADE).save(tmp_path / "step.pdf")


def test_without_a_step_nothing_is_written(tmp_path: Path) -> None:
    empty = replace(MADE, ranks=(replace(MADE.ranks[0], events=()),))
    with pytest.raises(ValueError, match="No whole step was recorded"):
        Result(empty).save(tmp_path / "step.html")
    assert list(tmp_path.iterdir()) == []


def test_what_was_saved_can_be_loaded_again(tmp_path: Path) -> None:
    Result(MADE).save(tmp_path / "step.json")
    loaded = load(tmp_path / "step.json")
    assert loaded.recording == MADE


def test_another_file_is_refused(tmp_path: Path) -> None:
    for content in ("{}", '{"minddp": []}'):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(ValueError, match="holds no recording"):
            load(tmp_path / "other.json")


def test_only_the_first_rank_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = Result(MADE, is_first=False)
    elsewhere.save(tmp_path / "step.html")
    elsewhere.explain()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""
