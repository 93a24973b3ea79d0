"""Results survive being written and read, and are readable by people."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import results


def test_rows_of_numbers_stay_on_a_line(tmp_path: Path):
    report = {"rounds_ms": {"a [b]": [1.5, 2, 3], "c": []}, "nested": {"texts": ["x, y", "[z]"]}}
    path = results.path_of("question", tmp_path / "new")
    results.write(report, path)
    assert '"a [b]": [ 1.5, 2, 3 ]' in path.read_text()
    assert results.read(path) == report


def test_what_has_not_been_written_is_none(tmp_path: Path):
    assert results.read(results.path_of("question", tmp_path)) is None


def test_paths_are_nobody_elses_business():
    @dataclass
    class Config:
        rounds: int = 3
        out: Path = Path("/somewhere")

    assert results.of_config(Config()) == {"rounds": 3}
