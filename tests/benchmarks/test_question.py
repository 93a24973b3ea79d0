"""The common parts of questions: options that are checked, ranks that answer, reports that are saved."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console

from benchmarks.display import RATIO, Table, table_of
from benchmarks.question import ModelError, RaceOptions, Report, ask, path_of, read, report_of, write
from minddp.platform.ranks import RankFailure


@dataclass(frozen=True, kw_only=True)
class Config(RaceOptions):
    LEAST = RaceOptions.LEAST | {"world_size": 2}

    answer: int = 42


def _answer(rank: int, config: Config) -> dict[str, Any]:
    return report_of("what is it?", config, answers=[config.answer, rank, dist.get_world_size()])


def _tables(report: Report) -> Iterator[Table]:
    yield Table("What is it?", ("what", "answer"), [["it", f"{report['answers']}"]], "that is all")


def test_every_rank_answers_and_rank_0s_report_is_printed_and_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "new folder"
    ask("x", _answer, Config(out=out, timeout_s=240, rounds=3), _tables)
    kept = json.loads((out / "x.json").read_text())
    assert (out / "x.md").read_text().startswith("### What is it?")
    printed = capsys.readouterr().out
    assert "[42, 0, 2]" in printed
    assert "that is all" in printed
    assert (kept["question"], kept["answers"]) == ("what is it?", [42, 0, 2])
    assert kept["config"]["rounds"] == 3
    assert "out" not in kept["config"], "a path means nothing elsewhere"
    assert {"cpu", "torch", "load_average_before"} <= set(kept["machine"])
    assert str(tmp_path) not in json.dumps(kept)


def _refuse(rank: int, config: Config) -> dict[str, Any]:
    if config.answer == 42:
        raise ModelError("make() returned a list; return a tuple.")
    raise ZeroDivisionError("a fault of ours")


def test_a_model_that_cannot_be_trained_is_one_line_and_any_other_fault_a_traceback():
    with pytest.raises(SystemExit) as refused:
        ask("x", _refuse, Config(size="smoke", timeout_s=240), _tables)
    assert refused.value.code == "minddp bench x: make() returned a list; return a tuple."
    with pytest.raises(RankFailure, match="a fault of ours"):
        ask("x", _refuse, Config(size="smoke", timeout_s=240, answer=0), _tables)


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"warmup_rounds": 0}, {"threads": 0}, {"world_size": 1}])
def test_options_below_what_they_must_be_are_refused(wrong: dict[str, int]):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .; it must be at least"):
        Config(**wrong)


def test_a_look_is_quicker_and_does_not_overwrite_a_measurement():
    full, quick, smoke = (Config(rounds=20, size=size) for size in ("full", "quick", "smoke"))
    assert [config.race_rounds.timed for config in (full, quick, smoke)] == [20, 8, 2]
    assert [config.turn(5) for config in (full, quick, smoke)] == [5, 5, 1]
    assert [config.workload_size for config in (full, quick, smoke)] == ["full", "full", "tiny"]
    assert full.path("x") == path_of("x")
    assert quick.path("x") is smoke.path("x") is None
    assert Config(size="smoke", out=Path("d")).path("x") == Path("d", "x.json")


def test_rows_of_numbers_stay_on_a_line(tmp_path: Path):
    report = {"rounds_ms": {"a [b]": [1.5, 2, 3], "c": []}, "nested": {"texts": ["x, y", "[z]"]}}
    path = path_of("question", tmp_path / "new")
    assert read(path) is None
    write(report, path)
    assert '"a [b]": [ 1.5, 2, 3 ]' in path.read_text()
    assert read(path) == report


def test_a_table_is_the_same_on_a_terminal_and_on_a_page():
    figures = {"a": {"ms": 1.234, "ratio": {"median": 0.5, "low": 0.4, "high": 0.6}}}
    table = table_of("Title", "name", {"ms": "{ms:.2f}", "ratio": RATIO}, figures, "below")
    assert table.rows == [["a", "1.23", "0.500 (0.400–0.600)"]]
    assert table.markdown() == (
        "### Title\n\n| name | ms | ratio |\n| --- | --- | --- |\n| a | 1.23 | 0.500 (0.400–0.600) |\n\nbelow"
    )
    console = Console(record=True, width=80, file=io.StringIO())
    table.show(console)
    shown = console.export_text()
    assert all(word in shown for word in ("Title", "ratio", "0.500 (0.400–0.600)", "below"))
