"""Gradients under torch's distributed autograd (RPC): averaged in their context, while `.grad` stays as it was."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc

import minddp
from minddp.core.autograd import distributed_context
from tests.features.beside import Steps, Wrap, play
from tests.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks of their own, since a process joins an RPC group once in its life."""
    pool = RankPool(2)
    try:
        yield pool
    finally:
        pool.kill()


def _have_rpc(rank: int) -> None:
    """Join the RPC group, unless this process has. The ranks meet in a file of rank 0."""
    if rpc.api._is_current_rpc_agent_set():
        return
    with tempfile.TemporaryDirectory(prefix="minddp-rpc-") as folder:
        meeting = [folder]
        dist.broadcast_object_list(meeting)
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting[0]}/store", rpc_timeout=120)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=dist.get_world_size(), rpc_backend_options=options)
        dist.barrier()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=True)
        self.first = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, extra: bool = True) -> torch.Tensor:
        y = self.first(x + self.words(torch.arange(len(x))))
        return self.last(self.extra(y) if extra else y)


def _twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Runs on the other worker."""
    return torch.tanh(x @ weight)


def _in_context(ddp: Any, rank: int, step: int, *, remote: bool, **arguments: Any) -> dict[str, torch.Tensor]:
    """Gradients of one step, by name, as the context has them."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    names = {param: name for name, param in ddp.module.named_parameters()}
    with dist_autograd.context() as context:
        output = ddp(x, **arguments)
        if remote:
            other = f"worker{1 - rank}"
            output = rpc.rpc_sync(other, _twice, args=(output, torch.full((2, 2), 0.5)))
        dist_autograd.backward(context, [output.square().sum()])
        gradients = dist_autograd.get_gradients(context)
        return {names[param]: _dense(grad) for param, grad in gradients.items() if param in names}


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_dense() if grad.is_sparse else grad.clone()


def _steps(wrap: Wrap, rank: int, options: dict[str, Any], remote: bool) -> Steps:
    """In between comes an ordinary backward, whose gradients stay in `.grad`."""
    torch.manual_seed(0)
    ddp = wrap(Net(), **options)
    for step in range(4):
        kept = {name: param.grad for name, param in ddp.module.named_parameters()}
        if step == 2:
            ddp(torch.ones(2, 4)).sum().backward()
            yield {name: _dense(param.grad) for name, param in ddp.module.named_parameters()}
            continue
        in_context = _in_context(ddp, rank, step, remote=remote)
        assert in_context.keys() == kept.keys()
        assert all(param.grad is kept[name] for name, param in ddp.module.named_parameters())
        yield in_context


def _beside(rank: int, options: dict[str, Any], remote: bool) -> None:
    _have_rpc(rank)
    play(rank, _steps, options, remote)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "small buckets": {"bucket_cap_mb": 0.0001},
}


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bits_in_the_context_are_torchs(pool: RankPool, options: dict[str, Any], remote: bool) -> None:
    pool.run(_beside, options, remote)


def _batched(rank: int) -> None:
    _have_rpc(rank)
    results = []
    for options in ({}, {"batched_grad_copy": True}):
        torch.manual_seed(0)
        ddp = minddp.DistributedDataParallel(Net(), **options)
        results.append([_in_context(ddp, rank, step, remote=False) for step in range(2)])
    for one, other in zip(*results, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_gradients_can_be_copied_in_batches(pool: RankPool) -> None:
    """Torch's fails an internal assertion. On two ranks dividing and multiplying have the same bits."""
    pool.run(_batched)


def _outside_of_a_context(rank: int) -> None:
    """RPC is there, and a context too, but the backward is an ordinary one."""
    _have_rpc(rank)
    assert distributed_context() is None
    ddp = minddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with dist_autograd.context() as context:
        assert distributed_context() == context
        ddp(torch.full((1, 1), float(rank))).sum().backward()
        assert dist_autograd.get_gradients(context) == {}
    assert ddp.module.weight.grad.item() == 0.5


def test_an_ordinary_backward_in_a_context_goes_to_grad(pool: RankPool) -> None:
    pool.run(_outside_of_a_context)


def _used_elsewhere_only(rank: int) -> tuple[str, bool]:
    _have_rpc(rank)
    torch.manual_seed(0)
    ddp = minddp.DistributedDataParallel(Net(), find_unused_parameters=True)
    text = "no error"
    try:
        _in_context(ddp, rank, 0, remote=False, extra=rank == 0)
    except RuntimeError as error:
        text = str(error)
    return text, all(param.grad is None for param in ddp.parameters())


def test_what_only_other_ranks_use_is_named(pool: RankPool) -> None:
    (used, clean_here), (unused, clean_there) = pool.run(_used_elsewhere_only)
    assert used == "no error"
    assert "only other ranks have used: extra.weight, extra.bias" in unused
    assert clean_here
    assert clean_there


def test_without_rpc_there_is_no_context() -> None:
    """In this process, which has no RPC."""
    assert distributed_context() is None
