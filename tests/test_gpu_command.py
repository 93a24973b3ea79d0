"""`make gpu` itself: parts that fail, hang or die keep no other from running, and a table comes last."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import __main__ as command
from tests.gpu.__main__ import Part

BODIES = {
    "passes": "print('all is well')",
    "fails": "print('the reason'); raise SystemExit(3)",
    "hangs": "import time; print('began', flush=True); time.sleep(100)",
    "dies": "import os; os.kill(os.getpid(), 11)",
}


def test_without_a_gpu_it_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 0
    assert capsys.readouterr().out.startswith("No NVIDIA GPU here, so nothing was run")


def test_no_part_keeps_another_from_running(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    parts = tuple(Part(name, (), 1.0 if name == "hangs" else 60.0) for name in ("fails", "hangs", "dies", "passes"))
    monkeypatch.setattr(command, "PARTS", parts)
    monkeypatch.setattr(command, "_command", lambda part, *_, **__: [sys.executable, "-c", BODIES[part.name]])
    assert command.main(["--rehearse", "--out", str(tmp_path)]) == 1
    written = json.loads((tmp_path / "gpu.json").read_text())
    statuses = {part["part"]: part["status"] for part in written["parts"]}
    expected = {"fails": "failed", "hangs": "ended after 1 s", "dies": "killed by signal 11", "passes": "passed"}
    assert statuses == expected
    shown = capsys.readouterr().out
    assert "the reason" in shown
    assert "all is well" not in shown, "only what failed is shown"
    assert "all is well" in (tmp_path / "gpu.log").read_text()
    assert shown.rstrip().splitlines()[-1].startswith("passes")
    lines = [line for line in shown.splitlines() if line.startswith("hangs: ")]
    assert lines == ["hangs: ended after 1 s, 1 s; tests: 0 passed, 0 failed, 0 skipped"]


def test_results_are_kept_when_other_parts_are_run_and_the_rest_can_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """For a machine that is available for minutes at a time."""
    monkeypatch.setattr(command, "PARTS", tuple(Part(name, (), 60.0) for name in ("fails", "hangs", "passes")))
    monkeypatch.setattr(command, "_command", lambda part, *_, **__: [sys.executable, "-c", BODIES[part.name]])

    def statuses(*options: str) -> dict[str, str]:
        command.main(["--rehearse", "--out", str(tmp_path), *options])
        return {part["part"]: part["status"] for part in json.loads((tmp_path / "gpu.json").read_text())["parts"]}

    monkeypatch.setattr(command, "LEAST_S", 0.5)
    assert statuses("--parts", "passes") == {"passes": "passed"}
    assert statuses("--parts", "hangs", "--budget-s", "1.5") == {"hangs": command.CUT_SHORT, "passes": "passed"}
    known = {"fails": command.NOT_RUN, "hangs": command.CUT_SHORT, "passes": "passed"}
    assert statuses("--budget-s", "0.1") == known, "what is known stays"
    capsys.readouterr()
    monkeypatch.setitem(BODIES, "hangs", BODIES["passes"])
    assert statuses("--rest") == {"fails": "failed", "hangs": "passed", "passes": "passed"}
    assert "passes:" not in capsys.readouterr().out, "of that there was a result"


def test_a_part_that_dies_reports_how_far_it_came() -> None:
    outcome = command.Outcome("nccl", "passed")
    command._read_progress(
        "collected 4 items\n"
        "tests/gpu/test_x.py::test_one[nccl1-views, zeroed] PASSED          [ 25%]\n"
        "tests/gpu/test_x.py::test_two[nccl1] SKIPPED (why)  [ 50%]\n"
        "tests/gpu/test_x.py::test_three[nccl2] FAILED [ 75%]\n"
        "tests/gpu/test_x.py::test_four[nccl2-a b] ",
        outcome,
    )
    assert (outcome.passed, outcome.skipped) == (1, 1)
    assert outcome.failed == {"test_three[nccl2]": "see the log", "test_four[nccl2-a b]": "the part ended in it"}


def test_worlds_that_did_not_come_up_are_found_in_the_outcome() -> None:
    card = command.Outcome("card", "failed", failed={"test_a_world_comes_up[nccl2]": "it hung", "test_a_card": "x"})
    assert command._worlds_down(card) == ["nccl2"]
    assert command._worlds_down(None) == []


def test_what_would_begin_too_late_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "PARTS", (Part("passes", (), 60.0),))
    assert command.main(["--rehearse", "--out", str(tmp_path), "--budget-s", "1"]) == 1
    [part] = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert part["status"] == "not run: no time left"


def test_a_report_is_reduced_to_the_main_line(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="good"/><testcase name="left"><skipped/></testcase>'
        '<testcase name="bad"><failure message="Traceback&#10;  File x&#10;ValueError: the cause&#10;E   more"/>'
        "</testcase></testsuite></testsuites>"
    )
    outcome = command.Outcome("part", "failed")
    command._read_report(report, outcome)
    assert (outcome.passed, outcome.skipped, outcome.failed) == (1, 1, {"bad": "ValueError: the cause"})
