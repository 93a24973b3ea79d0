"""The all-reduce benchmark, end to end on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import all_reduce
from benchmarks.all_reduce import BASELINE, COPIED, RESIDENT, Config


def test_two_ranks_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    all_reduce.main(Config(sizes_kib=(4, 3000), size="smoke", out=tmp_path, timeout_s=240))
    for result in json.loads((tmp_path / "all_reduce.json").read_text())["sizes"]:
        assert result["same_bits"]
        assert set(result["median_ms"]) == {BASELINE, RESIDENT, COPIED}
        for ratio in result["ratios"].values():
            assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
    printed = capsys.readouterr().out
    assert "resident" in printed
    assert "equal to the bit" in printed
