"""The benchmark of collectives, end to end on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import collectives
from benchmarks.collectives import ALLOCATED, CALLS, GLOO, MEMCPY, MINDDP, Config


def test_two_ranks_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    collectives.main(Config(sizes_kib=(4, 3000), size="smoke", out=tmp_path, timeout_s=240))
    races = json.loads((tmp_path / "collectives.json").read_text())["races"]
    assert [race["collective"] for race in races] == [name for name in CALLS for _ in range(2)]
    for race in races:
        assert race["same_bits"]
        allocated = {ALLOCATED} if race["collective"] == "all_reduce" else set()
        assert set(race["median_ms"]) == {GLOO, MINDDP, MEMCPY} | allocated
        for ratio in race["ratios"].values():
            assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
    printed = capsys.readouterr().out
    assert "4 KiB, allocated" in printed
    assert "equal to the bit" in printed


def test_results_that_differ_are_said_to() -> None:
    ratio = {"median": 0.5, "low": 0.4, "high": 0.6}
    race = {
        "collective": "broadcast",
        "kib": 64,
        "same_bits": False,
        "median_ms": {GLOO: 1.0, MINDDP: 0.5},
        "ratios": {MINDDP: ratio},
        "of_memcpy": {MINDDP: ratio},
    }
    *_, table = collectives.tables({"races": [race], "config": {"world_size": 2}})
    assert table.rows == [["64 KiB", "1.000", "0.500", "0.500 (0.400–0.600)", "50%"]]
    assert "DIFFER" in table.caption
