"""`minddp forecast`: a job from a recording, and what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.learning import recorded as kept
from minddp.cli import main
from minddp.tools.forecast.link import FREE, all_reduce
from minddp.tools.xray.forecast_command import job_of_recording
from minddp.tools.xray.result import load


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "step.json"
    next(one for one in kept.results() if one.recording.title == "minddp").save(path)
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[list[str]]:
    assert main(["forecast", *map(str, arguments)]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["forecast", *map(str, arguments)])
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_recorded_step_is_foretold_where_it_was_recorded(recording: Path):
    analysis = load(recording).analysis
    job, hop = job_of_recording(analysis)
    step_s = job.step_s(all_reduce(2, 1, hop, FREE))
    assert step_s == pytest.approx(analysis.typical.length_ns / 1e9, rel=0.1)
    assert step_s == pytest.approx(analysis.predicted_ns / 1e9, rel=0.1), "as X-ray predicts it"


@pytest.mark.parametrize(("bucket_mb", "buckets"), [("auto", None), ("100", "1")])
def test_a_row_for_each_number_of_ranks(
    recording: Path, capsys: pytest.CaptureFixture[str], bucket_mb: str, buckets: str | None
):
    more = ("--bucket-mb", bucket_mb)
    head, *rows = shown(capsys, recording, "--ranks", 2, 8, 9, "--hosts", 1, 2, 3, "--rate", 1, *more)
    assert head[0] == "ranks"
    assert [row[:2] for row in rows] == [["2", "1"], ["8", "2"], ["9", "3"]]
    assert buckets is None or {row[2] for row in rows} == {buckets}


def test_mistakes_are_named(tmp_path: Path, recording: Path, capsys: pytest.CaptureFixture[str]):
    assert "Pass --rate" in refused(capsys, recording, "--hosts", 2)
    assert "--hosts has 2 numbers, --ranks 3" in refused(capsys, recording, "--hosts", 1, 2, "--rate", 1)
    assert "3 ranks cannot be divided equally" in refused(
        capsys, recording, "--ranks", 3, "--hosts", 2, "--rate", 1
    )
    assert "invalid positive value: '0'" in refused(capsys, recording, "--rate", 0)
    (tmp_path / "other.json").write_text("{}")
    assert "holds no recording" in refused(capsys, tmp_path / "other.json")
