"""Modules whose gradients travel in shared memory, beside torch's own wrapper on gloo: the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP

import minddp
from minddp.transport.shared_memory import SharedMemoryTransport
from tests.ranks import RankPool, on_ranks

Ranks = Callable[[int], RankPool]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 50), nn.Linear(50, 3))


def shared_memory_of(ddp: nn.Module) -> SharedMemoryTransport:
    transport = ddp._transport
    transport = getattr(transport, "_transport", transport)  # within one that watches it
    assert isinstance(transport, SharedMemoryTransport)
    return transport


def train_beside_torch(rank: int, options: dict[str, Any]) -> tuple[bool, list[int]]:
    """True if gradients and parameters are equal throughout; the number of segments after each step."""
    torch.manual_seed(0)
    module = network()
    theirs = NativeDDP(copy.deepcopy(module), bucket_cap_mb=0.005, **options)
    ours = minddp.DistributedDataParallel(
        copy.deepcopy(module), bucket_cap_mb=0.005, transport="shared_memory", **options
    )
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9) for ddp in (theirs, ours)]
    generator = torch.Generator().manual_seed(rank)
    num_made = []
    for _ in range(5):
        inputs = torch.randn(4, 6, generator=generator)
        for ddp, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            ddp(inputs).square().sum().backward()
            optimizer.step()
        num_made.append(shared_memory_of(ours)._num_created)
        pairs = list(zip(theirs.parameters(), ours.parameters(), strict=True))
        if not all(torch.equal(a, b) and torch.equal(a.grad, b.grad) for a, b in pairs):
            return False, num_made
    return True, num_made


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
    ranks: Ranks, world_size: int, options: dict[str, Any]
) -> None:
    for is_equal, num_made in ranks(world_size).run(train_beside_torch, options):
        assert is_equal
        assert num_made[2:] == num_made[2:3] * 3  # the buckets have been rebuilt by then


@on_ranks(2)
def test_two_modules_at_once_over_one_group(rank: int) -> None:
    """One loss through two wrapped modules."""
    torch.manual_seed(0)
    modules = [network(), network()]
    ours = [minddp.DistributedDataParallel(copy.deepcopy(m), transport="shared_memory") for m in modules]
    theirs = [NativeDDP(copy.deepcopy(m)) for m in modules]
    for step in range(3):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        for first, second in (ours, theirs):
            (first(inputs) * second(inputs)).sum().backward()
    pairs = zip(nn.ModuleList(ours).parameters(), nn.ModuleList(theirs).parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@on_ranks(2)
def test_kept_gradients_keep_their_values(rank: int) -> None:
    """A gradient that a script keeps keeps its values, also when that memory was a bucket's."""
    torch.manual_seed(0)
    ddp = minddp.DistributedDataParallel(nn.Linear(16, 16), transport="shared_memory")
    kept, copies = [], []
    for _ in range(6):
        ddp.zero_grad()
        ddp(torch.randn(2, 16)).sum().backward()
        kept.append(ddp.module.weight.grad)
        copies.append(ddp.module.weight.grad.clone())
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
