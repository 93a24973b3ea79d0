"""Every wrong input ends in a clear error, soon, on every rank; nothing hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import minddp
from tests.ranks import RankFailure, RankPool, on_ranks


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def _outcome(attempt: Callable[[], Any]) -> str:
    """`Type: message`, or "no error"."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


DELAYED = "delay_all_reduce_named_params.*param_to_hook_all_reduce"


@on_ranks(2)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device_ids": [0]}, r"device_ids and output_device.*\[0\]"),
        ({"transport": "carrier pigeon"}, "carrier pigeon"),
        ({"delay_all_reduce_named_params": [("weight", None)]}, DELAYED),
        ({"param_to_hook_all_reduce": torch.zeros(1)}, DELAYED),
    ],
)
def test_a_wrong_argument_is_a_clear_error_on_every_rank(rank: int, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){words}"):
        minddp.DistributedDataParallel(linear(), **arguments)


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "outcome"),
    [("conjugate", "no error"), ("negative", "no error"), ("expanded", "RuntimeError"), ("sparse", "RuntimeError")],
)
def test_odd_buffers_have_one_outcome_on_all_ranks(rank: int, kind: str, outcome: str) -> None:
    """Layouts that torch can broadcast arrive. The others raise an error on every rank, and no rank hangs."""
    module = linear()
    buffer = {
        "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
        "negative": lambda: torch._neg_view(torch.tensor([1.0])),
        "expanded": lambda: torch.zeros(1).expand(3),
        "sparse": lambda: torch.eye(2).to_sparse(),
    }[kind]()
    module.register_buffer("odd", buffer)
    text = _outcome(lambda: minddp.DistributedDataParallel(module))
    assert text.startswith(outcome)
    assert "Timed out" not in text
    assert "closed" not in text.lower()


def _train_until_killed(rank: int, victim: int, killed_in_step: int) -> str:
    ddp = minddp.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)), bucket_cap_mb=0.001)
    for step in range(50):
        output = ddp(torch.ones(2, 64))
        if rank == victim and step == killed_in_step:
            os.kill(os.getpid(), signal.SIGKILL)
        output.sum().backward()
    return "trained to the end"


@pytest.mark.parametrize(("victim", "step"), [(2, 0), (0, 3)])
def test_when_a_rank_is_killed_the_others_get_an_error(victim: int, step: int) -> None:
    pool = RankPool(3, grace_s=60)
    try:
        with pytest.raises(RankFailure) as failure:
            pool.run(_train_until_killed, victim, step)
    finally:
        pool.kill()
    reports = failure.value.reports
    assert sorted(reports) == [0, 1, 2]
    assert "died with exit code -9" in reports.pop(victim)
    for report in reports.values():
        assert "RuntimeError" in report


def _only_rank_0_goes_on(rank: int) -> str:
    ddp = minddp.DistributedDataParallel(linear())
    ddp(torch.ones(1, 2)).sum().backward()
    if rank == 1:
        return "stopped early"
    return _outcome(lambda: [ddp(torch.ones(1, 2)).sum().backward() for _ in range(3)])


def test_a_rank_that_stops_early_is_an_error_within_the_groups_timeout() -> None:
    pool = RankPool(2, group_timeout_s=60)
    try:
        went_on, stopped = pool.run(_only_rank_0_goes_on, timeout_s=50)
    finally:
        pool.kill()
    assert stopped == "stopped early"
    assert went_on.startswith("Stuck: ")
