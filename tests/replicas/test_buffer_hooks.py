"""Hooks that keep buffers in step in their own way: as torch's, before or after forward."""

from __future__ import annotations

import inspect
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation

import minddp
from tests.features.beside import Trail, Wrap, play, random, snapshot
from tests.ranks import of_all_ranks, on_ranks


class Net(nn.Module):
    """Two kinds of buffers; `local` is to be left alone. One is a new tensor after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("local", torch.zeros(1))
        self._ddp_params_and_buffers_to_ignore = ["local"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.local += x.detach().sum()
        self.seen = self.seen + x.detach().mean(0)
        return self.norm(self.body(x)) + self.seen


# The backward of a norm refuses buffers written since its forward, unless the write is hidden from autograd.
MAY_CHANGE_BUFFERS_AFTER_FORWARD = "_unsafe_preserve_version_counter" in inspect.getsource(TorchDDP)


def register(ddp: Any, hook: Any, state: Any, *, after_forward: bool) -> None:
    location = _BufferCommHookLocation.POST_FORWARD if after_forward else _BufferCommHookLocation.PRE_FORWARD
    ddp._register_buffer_comm_hook(state, hook, location)


def average_now(_state: object, buffers: dict[str, torch.Tensor]) -> None:
    for buffer in buffers.values():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()


def sum_later(calls: list[list[str]], buffers: dict[str, torch.Tensor]) -> list[Any]:
    """Of what each rank has counted; complete by the end of backward."""
    calls.append(list(buffers))
    return [dist.all_reduce(buffers["seen"], async_op=True).get_future()]


def nothing(_state: object, _buffers: dict[str, torch.Tensor]) -> None:
    return None


HOOKS = {"average now": average_now, "sum later": sum_later, "nothing": nothing}


def train(wrap: Wrap, rank: int, name: str, after_forward: bool, options: dict[str, Any]) -> Trail:
    torch.manual_seed(0)
    ddp = wrap(Net(), **options)
    calls: list[list[str]] = []
    register(ddp, HOOKS[name], calls, after_forward=after_forward)
    trail = []
    for step in range(6):
        ddp.train(step != 2)
        with torch.no_grad() if step == 2 else ddp.no_sync() if step == 4 else nullcontext():
            output = ddp(random(4, 3, rank=rank, step=step))
        if step != 2:
            output.square().mean().backward()
        dist.barrier()  # for what was begun after a forward that no synchronised backward has followed
        trail.append(snapshot(ddp, output=output, calls=torch.tensor(len(calls))))
        ddp.zero_grad()
    expected = ["seen", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert all(names == expected for names in calls)
    return trail


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "left alone": {"forward_sync_buffers": False},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


@on_ranks(2)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("name", "after_forward"),  # what is summed later must not be needed in forward
    [("average now", False), ("average now", True), ("sum later", True), ("nothing", False), ("nothing", True)],
)
def test_bits_are_torchs(rank: int, name: str, after_forward: bool, options: dict[str, Any]) -> None:
    if name == "average now" and after_forward and not MAY_CHANGE_BUFFERS_AFTER_FORWARD:
        pytest.skip("the installed torch takes a buffer that is written after forward for a fault of autograd's")
    _, second, *_ = play(rank, train, name, after_forward, options)
    if name == "average now" and after_forward:
        one, other = of_all_ranks(second["module.norm.running_mean"])
        assert torch.equal(one, other) == (options != OPTIONS["left alone"])


# ------------------------------------------------------------------ what is promised besides


@on_ranks(2)
def test_the_end_of_backward_waits_for_a_hooks_futures(rank: int) -> None:
    """Which another thread completes later."""
    ddp = minddp.DistributedDataParallel(Net())
    future: torch.futures.Future[None] = torch.futures.Future()
    ddp.register_buffer_hook(None, lambda state, buffers: [future])
    output = ddp(torch.ones(2, 3))
    assert not future.done()
    later = threading.Timer(0.2, future.set_result, [None])
    output.register_hook(lambda grad: later.start())
    output.sum().backward()
    assert future.done()


@on_ranks(2)
def test_a_hook_that_cannot_be_called_is_refused(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(Net())
    with pytest.raises(TypeError, match="'average'"):
        ddp.register_buffer_hook(None, "average")


@on_ranks(2)
def test_after_a_hook_has_raised_the_next_step_works(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(Net())
    fails = [True]

    def hook(_state: object, _buffers: dict[str, torch.Tensor]) -> None:
        if fails.pop():
            raise KeyError("no such buffer")

    ddp.register_buffer_hook(None, hook, after_forward=False)
    with pytest.raises(KeyError, match="no such buffer"):
        ddp(torch.ones(2, 3))
    fails.append(False)
    ddp(torch.full((2, 3), float(rank))).sum().backward()
    assert torch.equal(*of_all_ranks(ddp.module.body.weight.grad))
