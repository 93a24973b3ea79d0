"""Modules whose gradients travel in shared memory, beside torch's own wrapper on gloo: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import minddp
from minddp.transport.shared_memory.shared_memory_transport import SharedMemoryTransport
from tests.features.beside import Steps, Wrap, play_over, random, snapshot
from tests.ranks import on_ranks


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 50), nn.Linear(50, 3))


def train(wrap: Wrap, rank: int, options: dict[str, Any], num_segments: list[int]) -> Steps:
    """Of minddp's wrapper, `num_segments` has the number of segments made so far, after each step."""
    torch.manual_seed(0)
    ddp = wrap(network(), bucket_cap_mb=0.005, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.001, momentum=0.9)
    for step in range(20):
        optimizer.zero_grad()
        ddp(random(4, 6, rank=rank, step=step)).square().sum().backward()
        optimizer.step()
        yield snapshot(ddp)
        if isinstance(ddp, minddp.DistributedDataParallel):
            transport = ddp._transport._transport  # within the one that watches it
            assert isinstance(transport, SharedMemoryTransport)
            num_segments.append(transport._shared._host._engine.own_memory._num_created)


@on_ranks(lambda world_size, **_: world_size)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    ],
    ids=lambda options: "+".join(options) or "default",
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_training_has_the_bits_of_torch_and_needs_no_new_memory(
    rank: int, world_size: int, options: dict[str, Any]
) -> None:
    num_segments: list[int] = []
    play_over(rank, "shared_memory", train, options, num_segments)
    # The buckets have been rebuilt by then. A copy needs another segment while a slow peer still reads the last one
    assert num_segments[-1] <= 2 * num_segments[2], num_segments


def train_two_at_once(wrap: Wrap, rank: int) -> Steps:
    """One loss through two wrapped modules."""
    torch.manual_seed(0)
    first, second = wrap(network()), wrap(network())
    for step in range(3):
        inputs = random(4, 6, rank=rank, step=step)
        (first(inputs) * second(inputs)).sum().backward()
        yield snapshot(nn.ModuleList([first, second]))


@on_ranks(2)
def test_two_modules_at_once_over_one_group(rank: int) -> None:
    play_over(rank, "shared_memory", train_two_at_once)
