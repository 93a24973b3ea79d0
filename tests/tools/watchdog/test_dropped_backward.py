"""A script catches an exception in the middle of backward and goes on: on one rank, or on all of them."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

import minddp
from minddp.core import unfinished
from minddp.tools.watchdog import Stuck
from tests.ranks import on_ranks
from tests.tools.watchdog.harness import run_apart
from tests.tools.watchdog.stuck import TwoBranches

FAULTY, FAILS_IN, STEPS = 1, 2, 5
LIMIT_S = 1.0


def train(
    rank: int, faulty: list[int], transport: str, cap_mb: float, skips: bool = False
) -> tuple[list[Any], str]:
    """The gradients of each step that came to its end, and how the script ended.

    On `faulty` ranks a step fails. If it `skips`, these leave the step out instead.
    """
    torch.manual_seed(0)
    ddp = minddp.DistributedDataParallel(
        TwoBranches(), transport=transport, stuck_after_s=LIMIT_S, bucket_cap_mb=cap_mb, first_bucket_cap_mb=cap_mb
    )
    torch.manual_seed(1 + rank)
    trail: list[Any] = []
    ended = "went on"
    for number, batch in enumerate(torch.randn(STEPS + (rank in faulty), 2, 4)):
        ddp.zero_grad()
        is_faulty = rank in faulty and number == FAILS_IN
        if is_faulty and skips:
            continue
        ddp.module.fails = is_faulty
        try:
            ddp(batch).square().sum().backward()
            trail.append([param.grad.tolist() for param in ddp.parameters()])
        except ZeroDivisionError:
            pass
        except Stuck as error:  # and a script may catch that, too
            ended = str(error)
    return trail, ended


IN_TWO_BUCKETS, IN_ONE = 1e-5, 25.0


def test_an_exception_on_one_rank_is_named_on_all() -> None:
    """Its next all-reduce would meet one of the interrupted backward, of the same size."""

    def play(world_size: int, transport: str) -> list[tuple[list[Any], str]]:
        """Collectives that they leave in their group would meet those of the next test."""
        return run_apart(world_size, train, [FAULTY], transport, IN_TWO_BUCKETS)

    with ThreadPoolExecutor(2) as players:
        runs = players.map(play, (2, 3), ("process_group", "shared_memory"))
    for trail, ended in [of_rank for run in runs for of_rank in run]:
        assert len(trail) == FAILS_IN, "a step after the exception has returned with gradients"
        assert "An exception has ended backward 3 on rank 1 before the gradients of `encoder." in ended
        assert "caught the exception and goes on, test_dropped_backward.py:" in ended


@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
def test_an_exception_on_all_ranks_leaves_out_a_step(ranks: Any, transport: str) -> None:
    arguments = ([0, 1, 2], transport, IN_TWO_BUCKETS)
    interrupted = ranks(3).run(train, *arguments)
    assert [(len(trail), ended) for trail, ended in interrupted] == [(STEPS, "went on")] * 3
    assert interrupted == ranks(3).run(train, *arguments, True)


def test_a_backward_of_which_nothing_was_launched_may_be_left_out_by_one_rank(ranks: Any) -> None:
    """Its next backward takes the place: the means are of gradients at equal parameters."""
    interrupted = ranks(2).run(train, [FAULTY], "process_group", IN_ONE)
    assert [(len(trail), ended) for trail, ended in interrupted] == [(STEPS, "went on")] * 2
    assert interrupted == ranks(2).run(train, [FAULTY], "process_group", IN_ONE, True)


@on_ranks(2)
def test_a_rank_that_raises_after_its_last_launch_does_not_wait_for_half_an_hour(rank: int) -> None:
    """Waits are not watched. The other rank has ended the step as if nothing had happened."""
    ddp = minddp.DistributedDataParallel(TwoBranches(), stuck_after_s=None)
    inputs = torch.ones(2, 4, requires_grad=True)
    if rank != FAULTY:
        ddp(inputs * 1).sum().backward()
        return
    inputs.register_hook(lambda grad: 1 / 0)
    with mock.patch.object(unfinished, "DROP_LIMIT_S", 0.5):
        with pytest.raises(ZeroDivisionError):
            ddp(inputs * 1).sum().backward()
        with pytest.raises(RuntimeError, match="has ended backward 1 on rank 1") as error:
            ddp(inputs)
    assert "Rank 0 has not come within 0.5 s" in str(error.value)


@pytest.mark.parametrize("stuck_after_s", [1.0, None])
@on_ranks(2)
def test_a_copy_on_one_rank_alone_changes_no_name_of_later_wrappers(rank: int, stuck_after_s: float | None) -> None:
    """Rank 0 alone copies a wrapper, as for a moving average; the next wrapper drops a backward on all ranks."""
    first, ddp = (
        minddp.DistributedDataParallel(TwoBranches(), transport="process_group", stuck_after_s=stuck_after_s)
        for _ in range(2)
    )
    copied = copy.deepcopy(first) if rank == 0 else None
    inputs = torch.ones(2, 4, requires_grad=True)
    handle = inputs.register_hook(lambda grad: 1 / 0)
    with mock.patch.object(unfinished, "DROP_LIMIT_S", 2.0):
        with pytest.raises(ZeroDivisionError):
            ddp(inputs * 1).sum().backward()
        handle.remove()
        ddp(inputs * 1).sum().backward()
    del copied
