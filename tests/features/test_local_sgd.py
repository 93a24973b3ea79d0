"""Post-local SGD with torch's own hook, optimizer and averagers: the same bits as torch's wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager

from tests.features.beside import Trail, Wrap, play, random, snapshot

GLOBAL_STEPS = 3  # gradients are averaged before, models after


def train(wrap: Wrap, rank: int, hierarchical: bool, options: dict[str, Any]) -> Trail:
    from torch.distributed.optim import PostLocalSGDOptimizer  # its import warns of torch.jit

    torch.manual_seed(0)
    ddp = wrap(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2)), **options)
    alone, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(
        process_group=None,
        subgroup=alone,
        start_localSGD_iter=GLOBAL_STEPS,
        post_local_gradient_allreduce=not hierarchical,
    )
    ddp.register_comm_hook(state, post_localSGD_hook)
    if hierarchical:
        periods = {2: dist.get_world_size()}
        averager: Any = HierarchicalModelAverager(periods, warmup_steps=GLOBAL_STEPS)
    else:
        averager = PeriodicModelAverager(period=2, warmup_steps=GLOBAL_STEPS)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), averager)
    trail = []
    for step in range(8):
        optimizer.zero_grad()
        ddp(random(4, 6, rank=rank, step=step)).square().sum().backward()
        optimizer.step()
        trail.append(snapshot(ddp))
    dist.destroy_process_group(alone)
    return trail


def _play(rank: int, hierarchical: bool, options: dict[str, Any]) -> list[list[float]]:
    return [taken["module.2.bias"].tolist() for taken in play(rank, train, hierarchical, options)]


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True, "static_graph": True}], ids=str)
def test_bits_are_torchs_and_ranks_drift_apart_between_averages(
    ranks: Any, hierarchical: bool, options: dict[str, Any]
) -> None:
    one, other = ranks(2).run(_play, hierarchical, options)
    in_step = [mine == yours for mine, yours in zip(one, other, strict=True)]
    assert in_step[:GLOBAL_STEPS] == [True] * GLOBAL_STEPS
    assert not all(in_step)
    assert any(in_step[GLOBAL_STEPS + 1 :])
