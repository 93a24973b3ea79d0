"""How many cores a process may use: its affinity, and the limits of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minddp.platform import host


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may run on four cores of eight."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 2, 4, 6}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)


@pytest.mark.parametrize(
    ("quota", "usable"),
    [
        (None, 4.0),
        ("max 100000\n", 4.0),
        ("150000 100000\n", 1.5),
        ("50000 100000\n", 0.5),
        ("900000 100000\n", 4.0),
        ("100000\n", 4.0),
        ("100000 0\n", 4.0),
        ("nonsense, of three words", 4.0),
        ("\ufffd", 4.0),
    ],
)
@pytest.mark.usefixtures("affinity")
def test_the_smaller_of_affinity_and_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str | None, usable: float
) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(host, "CPU_QUOTA", tmp_path / "cpu.max")
    assert host.usable_cores() == usable


@pytest.mark.usefixtures("affinity")
def test_where_the_system_has_no_affinity_the_machine_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert host.usable_cores() == 8.0
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert host.usable_cores() == 1.0


def test_a_file_that_cannot_be_read_sets_no_limit(tmp_path: Path) -> None:
    assert host.read_if_there(tmp_path) == ""  # a folder
    assert host.read_if_there(tmp_path / "none") == ""
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert host.cpu_quota(host.read_if_there(tmp_path / "binary")) is None
