"""How many cores a process may use: its affinity, and the limits of control groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from minddp.platform import cores


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may run on four cores of eight."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 2, 4, 6}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.mark.parametrize(
    ("files", "usable"),
    [
        ({}, 4.0),
        ({"cpu.max": "max 100000\n"}, 4.0),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "50000 100000\n"}, 0.5),
        ({"cpu.max": "900000 100000\n"}, 4.0),
        ({"cpu.max": "100000\n"}, 4.0),
        ({"cpu.max": "100000 0\n"}, 4.0),
        ({"cpu.max": "nonsense, of three words"}, 4.0),
        ({"cpu.max": "\ufffd"}, 4.0),
    ],
)
@pytest.mark.usefixtures("affinity")
def test_the_smaller_of_affinity_and_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: Mapping[str, str], usable: float
) -> None:
    write(tmp_path, files)
    monkeypatch.setattr(cores, "CONTROL_GROUPS", tmp_path)
    assert cores.usable_cores() == usable


@pytest.mark.usefixtures("affinity")
def test_where_the_system_has_no_affinity_the_machine_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cores, "CONTROL_GROUPS", tmp_path)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores.usable_cores() == 8.0
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores.usable_cores() == 1.0


def test_the_first_setting_that_exists_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path, {"memory.max": "", "memory/limit": " 17\n", "last": "18"})
    monkeypatch.setattr(cores, "CONTROL_GROUPS", tmp_path)
    assert cores.control_group("memory.max", "memory/limit", "last") == "17"
    assert cores.control_group("none", "memory.max") == ""


def test_a_file_that_cannot_be_read_sets_no_limit(tmp_path: Path) -> None:
    assert cores.read_if_there(tmp_path) == ""  # a folder
    assert cores.read_if_there(tmp_path / "none") == ""
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert cores.cpu_quota(cores.read_if_there(tmp_path / "binary")) is None
