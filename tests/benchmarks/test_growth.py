"""What grows along the axes: memory is counted right, what a process holds with others included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.growth import proportional_bytes
from tests.ranks import RankPool

KIB = 1024


def _held(rank: int, rollup: Path) -> int:
    return proportional_bytes(rollup)


def test_the_proportional_set_size_is_read_from_the_kernel(ranks: Callable[[int], RankPool], tmp_path: Path):
    rollup = tmp_path / "smaps_rollup"
    rollup.write_text("0-f ---p 0 00:00 0 [rollup]\nRss:  90 kB\nPss:  50 kB\nPss_Shmem:   24 kB\n")
    assert ranks(2).run(_held, rollup) == [50 * KIB] * 2


def _grown(rank: int) -> int:
    before = proportional_bytes()
    kept = torch.ones(16 * KIB * KIB, dtype=torch.uint8)
    grown = proportional_bytes() - before
    del kept
    return grown


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux only")
def test_what_a_process_holds_grows_by_what_it_allocates(ranks: Callable[[int], RankPool]):
    assert ranks(2).run(_grown) == [pytest.approx(16 * KIB * KIB, rel=0.1)] * 2
