"""What grows along the axes: memory is counted right, what a process holds with others included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.growth import proportional_bytes
from tests.ranks import on_ranks

KIB = 1024


@on_ranks(2)
def test_the_proportional_set_size_is_read_from_the_kernel(rank: int, tmp_path: Path) -> None:
    rollup = tmp_path / f"smaps_rollup_{rank}"
    rollup.write_text("0-f ---p 0 00:00 0 [rollup]\nRss:  90 kB\nPss:  50 kB\nPss_Shmem:   24 kB\n")
    assert proportional_bytes(rollup) == 50 * KIB


@on_ranks(2)
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux only")
def test_what_a_process_holds_grows_by_what_it_allocates(rank: int) -> None:
    before = proportional_bytes()
    kept = torch.ones(16 * KIB * KIB, dtype=torch.uint8)
    grown = proportional_bytes() - before
    del kept
    assert grown == pytest.approx(16 * KIB * KIB, rel=0.1)
