from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minddp.tools.launch.run import DEFAULTS, make_parser, xray
from minddp.tools.xray.reading import steps_of
from minddp.tools.xray.result import load
from tests.tools.launch.jobs import ROOT, minddp

SCRIPT = str(ROOT / "tests" / "tools" / "xray" / "script.py")


def test_what_follows_the_script_is_the_scripts() -> None:
    parser = make_parser("minddp xray")

    def parse(*arguments: str) -> Any:
        return parser.parse_args([*DEFAULTS["minddp xray"], *arguments])

    options = parse("--steps", "3:5", "--nproc-per-node", "4", SCRIPT, "--steps", "9", "--out", "elsewhere")
    assert (options.steps, options.nproc_per_node, options.training_script) == (range(3, 5), "4", SCRIPT)
    assert options.training_script_args == ["--steps", "9", "--out", "elsewhere"]
    assert (parse(SCRIPT).steps, parse(SCRIPT).nproc_per_node) == (range(10, 15), "2")
    assert parse("--out", "there", SCRIPT).xray == Path("there")


@pytest.mark.parametrize("text", ["5", "5:5", "6:5", "a:b", "-1:3", "1:2:3"])
def test_steps_that_mean_nothing_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        xray([f"--steps={text}", SCRIPT])
    assert "is not FIRST:LAST" in capsys.readouterr().err


@pytest.mark.slow
def test_a_script_runs_unchanged_and_is_recorded(tmp_path: Path) -> None:
    """Also when it fails later: what was recorded is saved, and the failure is the command's."""
    note = tmp_path / "note"
    of_script = ("--note", str(note), "--accumulate", "2", "--fail-at", "5")
    done = minddp("xray", "--out", str(tmp_path), "--steps", "2:4", SCRIPT, *of_script)
    assert done.returncode == 1
    assert "the script has failed" in done.stderr
    assert note.read_text().startswith("minddp.")
    assert note.read_text().endswith("__main__")
    assert done.stdout.startswith("Step: ")
    result = load(tmp_path / "step.json")
    assert [step.number for step in steps_of(result.recording)] == [2, 3]
    assert result.recording.title == "script.py"
    assert (tmp_path / "step.html").exists()
