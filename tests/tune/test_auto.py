"""Tuning on real ranks: one plan for all, right gradients before and after, and no way to ask for nonsense."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from minddp.tune.auto import OBSERVED_STEPS, WARM_UP_STEPS
from tests.ranks import RankPool

STEPS = 2 * (WARM_UP_STEPS + OBSERVED_STEPS) + 4


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))


def _tuned(rank: int) -> dict[str, Any]:
    ddp = minddp.DistributedDataParallel(layers(), bucket_cap_mb="auto")
    alone = layers()
    wrong = []
    for turn in range(STEPS):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * turn + rank))
        for model in (ddp, alone):
            model.zero_grad()
            model(x).square().mean().backward()
        for ours, own in zip(ddp.module.parameters(), alone.parameters(), strict=True):
            mean = own.grad / 2
            dist.all_reduce(mean)
            if not torch.allclose(ours.grad, mean):
                wrong.append(turn)
    tuning = ddp.tuning
    assert tuning is not None
    return {
        "wrong": wrong,
        "plan": str(ddp.plan),
        "tuned plan": str(tuning.plan),
        "before": str(tuning.before),
        "kept": tuning.is_kept,
        "measured": tuning.measured_s,
        "link": tuning.link,
    }


def test_ranks_come_to_one_plan_and_gradients_stay_right(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(_tuned)
    assert first["wrong"] == second["wrong"] == []
    assert first["plan"] == second["plan"]
    assert first["link"] == second["link"]
    assert first["plan"] == (first["tuned plan"] if first["kept"] else first["before"])
    if first["tuned plan"] != first["before"]:
        assert first["measured"] == second["measured"] > 0


def _with(rank: int, **options: Any) -> str:
    try:
        minddp.DistributedDataParallel(layers(), bucket_cap_mb="auto", **options)
    except ValueError as error:
        return str(error)
    return "no error"


def _without_a_second_opinion(rank: int, name: str, value: Any) -> str:
    return _with(rank, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("bucket_cap_mb_list", [1, 2]), ("first_bucket_cap_mb", 1), ("find_unused_parameters", True)],
)
def test_options_that_decide_the_plan_exclude_it(ranks: Callable[[int], RankPool], name: str, value: Any) -> None:
    for told in ranks(2).run(_without_a_second_opinion, name, value):
        assert "bucket_cap_mb" in told
        assert name in told


def _copied(rank: int) -> list[bool]:
    ddp = minddp.DistributedDataParallel(layers(), bucket_cap_mb="auto")
    memory = io.BytesIO()
    torch.save(ddp, memory)
    memory.seek(0)
    copies = [copy.deepcopy(ddp), torch.load(memory, weights_only=False)]
    for model in copies:
        model(torch.randn(2, 64)).sum().backward()
    return [model.tuning is None for model in copies]


def test_a_copy_tunes_its_own_buckets(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(_copied) == [[True, True]] * 2
