"""The table of questions is complete, and the command finds it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from typing_extensions import get_type_hints

import minddp
from benchmarks.__main__ import QUESTIONS, main
from tests.processes import python

FOLDER = Path(minddp.__file__).resolve().parent.parent / "benchmarks"


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
    from benchmarks import growth

    asked: list[growth.Config] = []
    monkeypatch.setattr(growth, "main", asked.append)
    main(["growth", "--rounds", "7", "--transport", "auto"])
    assert asked == [growth.Config(rounds=7, transports=("auto",))]


@pytest.mark.parametrize("options", [[], ["--size", "smoke"]])
def test_everything_asks_the_questions_with_a_page_and_draws_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, options: list[str]
):
    pytest.importorskip("matplotlib")
    asked: list[str] = []
    for name in list(QUESTIONS)[:5]:
        module = importlib.import_module(f"benchmarks.{name}")
        monkeypatch.setattr(module, "main", lambda config, name=name: asked.append(name))
    main(["everything", *options])
    drawn = [] if options else ["plots"]
    assert asked == ["versus_torch", "bucket_size", "growth", "collectives", *drawn]


def test_the_command_runs_the_benchmarks_from_anywhere(tmp_path: Path):
    (tmp_path / "benchmarks").mkdir()  # a folder that many a project has
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise RuntimeError('not these')")
    printed = python("-m", "minddp", "bench", "--help", cwd=tmp_path, PYTHONPATH=str(FOLDER.parent))
    assert "usage: minddp bench" in printed
    assert all(question in printed for question in QUESTIONS)
