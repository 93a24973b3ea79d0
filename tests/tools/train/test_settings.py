from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minddp.tools.train.launch import parse, run_rank
from minddp.tools.train.settings import Settings, SettingsError, arguments_for
from minddp.tools.train.task import load_task
from tests.tools.train.runs import command_line, tiny


def test_the_command_line_makes_the_settings(tmp_path: Path) -> None:
    settings = tiny(tmp_path, ddp="torch", ddp_options=("bucket_cap_mb=0.5", "static_graph=True"), clip_norm=None)
    assert parse(command_line(settings)) == settings


def test_options_are_literals_or_text() -> None:
    def function(number: float = 0, flag: bool = False, text: str = "") -> None: ...

    words = ["number=0.5", "flag=True", "text=a=b"]
    assert arguments_for(function, words, "--x") == {"number": 0.5, "flag": True, "text": "a=b"}
    for word in ("colour=red", "number"):
        with pytest.raises(SettingsError, match=f"--x {word}: .*; give NAME=VALUE, .* one of number, flag, text"):
            arguments_for(function, [word], "--x")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": 0}, "--steps must be greater than 0 and finite, but is 0"),
        ({"timeout_s": float("nan")}, "--timeout-s must be greater than 0"),
        ({"learning_rate": float("inf")}, "--learning-rate must be greater than 0 and finite"),
        ({"weight_decay": -0.1}, "--weight-decay must be at least 0"),
        ({"task": "chess"}, "--task chess is none of gpt, FILE.py:FUNCTION"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Settings(**changes)


def test_the_number_of_ranks_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(SettingsError, match="--nproc 2 differs from the 4 ranks"):
        run_rank(Settings(nproc=2))


@pytest.mark.parametrize(
    ("task", "words", "says"),
    [
        ("gpt", ("context=200000", "corpus_mib=1"), "context=200000 is longer than the text"),
        ("gpt", ("colour=red",), "--task-options colour=red: got an unexpected keyword argument 'colour'"),
        ("gpt", ("folder=/nowhere/at/all",), "contains 0 files that end in `.py`"),
        ("empty.py:line", (), "cannot be imported: .*no attribute 'line'"),
        ("none.py:x", (), "cannot be imported: .*No module named 'none'"),
    ],
)
def test_a_task_that_cannot_work(tmp_path: Path, task: str, words: tuple[str, ...], says: str) -> None:
    (tmp_path / "empty.py").touch()
    place = f"{tmp_path}/{task}" if ":" in task else task
    with pytest.raises(SettingsError, match=says):
        load_task(Settings(task=place, task_options=words))
