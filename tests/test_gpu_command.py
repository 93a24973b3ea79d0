"""`make gpu` itself: parts that fail, hang or die keep no other from running, and all is told last."""

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
    told = json.loads((tmp_path / "gpu.json").read_text())
    statuses = {part["part"]: part["status"] for part in told["parts"]}
    expected = {"fails": "failed", "hangs": "ended after 1 s", "dies": "killed by signal 11", "passes": "passed"}
    assert statuses == expected
    shown = capsys.readouterr().out
    assert "the reason" in shown
    assert "all is well" not in shown, "only what failed is shown"
    assert "all is well" in (tmp_path / "gpu.log").read_text()
    assert shown.rstrip().splitlines()[-1].startswith("passes")


def test_what_would_begin_too_late_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "PARTS", (Part("passes", (), 60.0),))
    assert command.main(["--rehearse", "--out", str(tmp_path), "--budget-s", "1"]) == 1
    [part] = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert part["status"] == "not run: no time left"


def test_a_report_is_boiled_down_to_the_most_telling_line(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="good"/><testcase name="left"><skipped/></testcase>'
        '<testcase name="bad"><failure message="Traceback&#10;  File x&#10;ValueError: the cause&#10;E   more"/>'
        "</testcase></testsuite></testsuites>"
    )
    outcome = command.Outcome("part", "failed")
    command._read_report(report, outcome)
    assert (outcome.passed, outcome.skipped, outcome.failed) == (1, 1, {"bad": "ValueError: the cause"})
