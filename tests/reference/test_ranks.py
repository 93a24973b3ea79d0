"""Processes as ranks: results in order, and what is reported if one raises, dies or hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from reference.grade import fault_of
from reference.ranks import RankFailure, Ranks


def summed(rank: int, factor: int) -> float:
    number = torch.tensor(float(rank + 1))
    dist.all_reduce(number)
    return factor * number.item() + rank


def fails(rank: int, how: str) -> int:
    if rank == 1:
        if how == "raised":
            raise ValueError("not today")
        if how == "died":
            os._exit(3)
        time.sleep(60)
    return os.getpid()


def pid(rank: int) -> int:
    return os.getpid()


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_in_order_and_no_process_is_left():
    with Ranks(2) as ranks:
        assert ranks.run(summed, 10) == [30, 31]
        pids = ranks.run(pid)
        assert ranks.run(pid) == pids
    assert not any(is_there(pid) for pid in pids)


def test_failures_are_told_apart_and_the_next_run_starts_anew():
    with Ranks(2, limit_s=4.0) as ranks:
        for how, says in (
            ("raised", "Rank 1: ValueError: not today"),
            ("died", "Rank 1: died"),
            ("hung", "Rank 1: hung"),
        ):
            before = ranks.run(pid)
            with pytest.raises(RankFailure) as failure:
                ranks.run(fails, how)
            assert fault_of(failure.value) == (how, says)
            assert not any(is_there(pid) for pid in before)


@pytest.mark.parametrize(
    ("reports", "trap"),
    [
        ({0: "hung", 1: "died"}, "died"),
        ({0: "hung", 1: "died", 2: "Traceback\nE: x"}, "raised"),
        ({0: "hung"}, "hung"),
    ],
)
def test_an_error_comes_before_a_death_and_a_death_before_a_hang(reports, trap):
    assert fault_of(RankFailure(reports)).trap == trap
