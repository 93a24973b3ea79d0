"""Rank 0 alone has loaded a checkpoint: all ranks go on from it, to the bits of a run that never stopped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import minddp
from tests.ranks import of_all_ranks, on_ranks
from tests.surface.models import TwoLayers

Make = Callable[[nn.Module], torch.optim.Optimizer]


def grouped(net: nn.Module) -> torch.optim.Optimizer:
    """Two groups, the second added later."""
    optimizer = torch.optim.AdamW(net.second.parameters(), lr=0.02, foreach=True)
    optimizer.add_param_group({"params": list(net.first.parameters()), "lr": 0.005})
    return optimizer


OPTIMIZERS: dict[str, Make] = {
    "Adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True),
    "fused": lambda net: torch.optim.Adam(net.parameters(), lr=0.01, fused=True),
    "tensor lr": lambda net: torch.optim.Adam(net.parameters(), lr=torch.tensor(0.01), foreach=False),
    "groups": grouped,
    "part": lambda net: torch.optim.SGD(net.second.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "LBFGS": lambda net: torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2),
    "ASGD": lambda net: torch.optim.ASGD(net.parameters(), lr=0.01),
}


def one_step(ddp: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = ddp(x).pow(2).mean()
        value.backward()
        return value

    optimizer.step(loss)


def bits(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"net": net.state_dict(), "optimizer": optimizer.state_dict()})


def same(one: Any, other: Any) -> bool:
    """Equal in structure, types, and bits."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@on_ranks(2)
def test_all_ranks_go_on_from_rank_0s_checkpoint(rank: int) -> None:
    for name, make in OPTIMIZERS.items():
        ddp = minddp.DistributedDataParallel(TwoLayers())
        optimizer = make(ddp.module)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(2):
            one_step(ddp, optimizer, step, rank)
        scheduler.step()
        checkpoint = bits(ddp.module, optimizer)
        one_step(ddp, optimizer, 2, rank)
        expected = bits(ddp.module, optimizer)

        ddp = minddp.DistributedDataParallel(TwoLayers())
        optimizer = make(ddp.module)
        if rank == 1:  # another state, and hyperparameters of its own
            one_step(ddp.module, optimizer, 7, rank)
            optimizer.param_groups[0]["own"] = 1
        if rank == 0:
            ddp.module.load_state_dict(checkpoint["net"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        ddp.synchronize(optimizer=optimizer)
        received = [checkpoint]  # LBFGS keeps the loss of its own rank
        dist.broadcast_object_list(received, 0)
        assert same(bits(ddp.module, optimizer), received[0]), name
        one_step(ddp, optimizer, 2, rank)
        assert name == "LBFGS" or same(bits(ddp.module, optimizer), expected), name


@on_ranks(2)
def test_from_another_rank_and_without_ignored_parameters(rank: int) -> None:
    net = TwoLayers()
    net._ddp_params_and_buffers_to_ignore = ["first.bias"]
    ddp = minddp.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=float(rank), momentum=0.5)
    optimizer.state[net.first.bias]["mine"] = rank
    optimizer.state[net.first.weight] = shared = {"a": torch.full((2,), float(rank))}
    shared["b"] = shared["a"]
    ddp.synchronize(1, optimizer=optimizer)
    state = optimizer.state[net.first.weight]
    assert optimizer.param_groups[0]["params"][0] is net.first.weight
    assert optimizer.state[net.first.bias]["mine"] == rank
    assert optimizer.param_groups[0]["lr"] == float(state["b"][0]) == 1.0
    assert state["a"] is state["b"]


@on_ranks(2)
def test_every_rank_ends_with_the_sources_state_alone(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(TwoLayers())
    optimizer = torch.optim.Adam(ddp.parameters())
    if rank == 1:
        one_step(ddp.module, optimizer, 0, rank)
    ddp.synchronize(optimizer=optimizer)
    assert len(optimizer.state) == 0


class Own(torch.Tensor):
    pass


@on_ranks(2)
def test_every_rank_raises_what_cannot_be_done(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(TwoLayers())
    params = list(ddp.parameters())
    other = torch.optim.SGD(params if rank == 0 else params[:3], lr=0.1)
    reordered = torch.optim.SGD(params if rank == 0 else params[::-1], lr=0.1)
    unsendable = torch.optim.SGD(params, lr=0.1)
    unsendable.param_groups[0]["closure"] = lambda: None
    subclassed = torch.optim.SGD(params, lr=0.1)
    subclassed.state[params[0]]["own"] = torch.zeros(3).as_subclass(Own)
    sharded = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    for optimizer, text in (
        (other, "`optimizer` is 'SGD with groups of 4 parameters' on rank 0, but 'SGD with groups of 3"),
        (reordered, "`the hash of their order` is"),
        (unsendable, "^Rank 0 cannot send the state of its SGD: "),
        (subclassed, "it holds a Own"),
        (sharded, "each rank holds a different part"),
        (object(), r"^`optimizer` takes a torch\.optim\.Optimizer, but got object\.$"),
    ):
        with pytest.raises((RuntimeError, ValueError, TypeError), match=text) as error:
            ddp.synchronize(optimizer=optimizer)
        assert len(set(of_all_ranks(str(error.value)))) == 1
