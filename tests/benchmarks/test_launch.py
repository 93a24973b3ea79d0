"""Ranks of a benchmark keep the memory that they free."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from benchmarks.launch import run_ranks


def _page_faults_of_allocating_again(rank: int) -> int:
    """The fewest for 64 MiB in some attempts: the first ones make the heap large enough."""
    faults = []
    for _ in range(12):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(16 * 2**20)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator has other variables")
def test_ranks_keep_the_memory_that_they_free():
    """[Note: memory is kept]"""
    (faults,) = run_ranks(_page_faults_of_allocating_again, world_size=1, threads=1, timeout_s=240)
    assert faults < 100
