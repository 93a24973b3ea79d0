"""Ranks of a benchmark: results come back in order, failures come back as errors, and no process stays behind."""

from __future__ import annotations

import multiprocessing
import platform
import resource
import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.launch import run_ranks
from minddp import RankFailure


def _describe(rank: int, word: str) -> tuple[int, str, int, int, float]:
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    return rank, word, dist.get_world_size(), torch.get_num_threads(), total.item()


def _fail_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 cannot")


def _sleep(rank: int) -> None:
    time.sleep(600)


def test_results_come_back_in_rank_order_from_one_group():
    results = run_ranks(_describe, "hello", world_size=2, threads=1, timeout_s=240)
    assert results == [(0, "hello", 2, 1, 3.0), (1, "hello", 2, 1, 3.0)]


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


def test_an_error_on_one_rank_is_raised_here_and_ends_the_others():
    before = set(multiprocessing.active_children())
    with pytest.raises(RankFailure, match="rank 1 cannot"):
        run_ranks(_fail_on_rank_1, world_size=2, threads=1, timeout_s=240)
    assert set(multiprocessing.active_children()) <= before


def test_ranks_that_take_too_long_are_ended():
    before = set(multiprocessing.active_children())
    with pytest.raises(RankFailure, match="rank 1: gave no answer in time"):
        run_ranks(_sleep, world_size=2, threads=1, timeout_s=1)
    assert set(multiprocessing.active_children()) <= before
