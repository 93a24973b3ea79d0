"""The table of questions is complete, and the command finds it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from typing_extensions import get_type_hints

from benchmarks.__main__ import QUESTIONS, main
from minddp import bench

FOLDER = Path(bench.__file__).resolve().parent.parent / "benchmarks"


def test_every_file_that_can_be_asked_is_in_the_table():
    asks = {path.stem for path in FOLDER.glob("*.py") if "\nclass Config" in path.read_text()}
    assert asks == set(QUESTIONS) - {"everything"}


@pytest.mark.parametrize("name", [name for name in QUESTIONS if name != "everything"])
def test_every_question_has_options_with_defaults_and_takes_them(name: str):
    if name == "plots":
        pytest.importorskip("matplotlib")
    module = importlib.import_module(f"benchmarks.{name}")
    assert get_type_hints(module.main) == {"config": module.Config, "return": type(None)}
    module.Config()


def test_options_reach_the_question(monkeypatch: pytest.MonkeyPatch):
    from benchmarks import hook_cost

    asked: list[hook_cost.Config] = []
    monkeypatch.setattr(hook_cost, "main", asked.append)
    main(["hook_cost", "--rounds", "7"])
    assert asked == [hook_cost.Config(rounds=7)]


@pytest.mark.parametrize("options", [[], ["--size", "smoke"]])
def test_everything_asks_the_questions_with_a_page_and_draws_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, options: list[str]
):
    pytest.importorskip("matplotlib")
    asked: list[str] = []
    for name in list(QUESTIONS)[:6]:
        module = importlib.import_module(f"benchmarks.{name}")
        monkeypatch.setattr(module, "main", lambda config, name=name: asked.append(name))
    main(["everything", *options])
    drawn = [] if options else ["plots"]
    assert asked == ["versus_torch", "bucket_size", "hook_cost", "all_reduce", "memory", *drawn]


def test_an_unknown_question_is_an_error(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["how_much"])
    assert "invalid choice" in capsys.readouterr().err


def test_the_command_runs_the_benchmarks_from_anywhere(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "minddp", "bench", "--help"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(FOLDER.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "usage: minddp bench" in done.stdout
    assert all(question in done.stdout for question in QUESTIONS)


def test_where_there_are_no_benchmarks_the_command_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert bench.main(["versus_torch"], repository=tmp_path) == 1
    assert f"no benchmarks in {tmp_path}" in capsys.readouterr().err
