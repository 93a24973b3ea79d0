"""Parameters whose all-reduce waits for the gradient of another one: torch's bits, and an end that waits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from minddp.modes.delayed import DelayedAllReduce
from tests.fakes import FakeTransport
from tests.features.beside import Trail, Wrap, play, random, snapshot
from tests.ranks import on_ranks


class Inner(nn.Module):
    """Uses `first` first, so that its gradient comes last. Nothing lies in the root: torch mistakes such names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.words = nn.Embedding(6, 4)
        self.picture = nn.Conv2d(1, 1, 2).to(memory_format=torch.channels_last)
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, uses_words: bool = True) -> torch.Tensor:
        y = self.first(x)
        if uses_words:
            y = y + self.words(torch.arange(len(x)))
        return self.last(self.picture(y.view(1, 1, -1, 4)).sum() + y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.inner(*args, **kwargs)


DELAYED = ["inner.words.weight", "inner.picture.weight", "inner.last.bias"]


def wrapped(
    wrap: Wrap, net: nn.Module, names: list[str] = DELAYED, trigger: str = "inner.first.weight", **options: Any
) -> Any:
    return wrap(
        net,
        delay_all_reduce_named_params=[(name, net.get_parameter(name)) for name in names],
        param_to_hook_all_reduce=net.get_parameter(trigger),
        **options,
    )


def wrapped_wholly(wrap: Wrap, net: nn.Module, sign: nn.Parameter, **options: Any) -> Any:
    """All that requires grad is delayed, and the sign comes from outside.

    Torch wants some parameter to be left, but in this case does not broadcast it.
    """
    net.inner.first.requires_grad_(False)
    for param in net.inner.first.parameters():
        param.fill_(0.5)
    named = [(name, param) for name, param in net.named_parameters() if param.requires_grad]
    ddp = wrap(net, delay_all_reduce_named_params=named, param_to_hook_all_reduce=sign, **options)
    ddp._lazy_init_ran = True  # torch 2.13 returns from its constructor without it, and could not run forward
    return ddp


def train(wrap: Wrap, rank: int, case: dict[str, Any]) -> Trail:
    torch.manual_seed(rank)  # rank 0's parameters are to be those of all ranks
    net, outer = Net(), nn.Parameter(torch.ones(4))
    if case.get("all"):
        ddp = wrapped_wholly(wrap, net, outer, **case.get("options", {}))
    else:
        ddp = wrapped(wrap, net, case.get("names", DELAYED), **case.get("options", {}))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    trail = []
    group = dist.group.WORLD
    for step in range(5):
        if step == case.get("parts"):
            group = [dist.new_group(ranks) for ranks in ([0, 1], [2])][rank // 2]
            ddp._update_process_group(group)
        with ddp.no_sync() if step == case.get("local") else nullcontext():
            x = random(4, 4, rank=rank, step=step) * outer
            output = ddp(x, uses_words=step != case.get("without_words"))
            output.square().mean().backward()
        dist.barrier(group)  # torch does not wait for this all-reduce, but its group's barrier does
        trail.append(snapshot(ddp))
        if step != case.get("local"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step == case.get("drops_one"):
            net.inner.words.weight.grad = None
    return trail


CASES: dict[str, dict[str, Any]] = {
    "some": {},
    "one": {"names": DELAYED[:1]},
    "all": {"all": True},
    "accumulation": {"local": 2},
    "one gradient dropped": {"drops_one": 1},
    "unused at times": {"without_words": 2},
    "other ranks": {"parts": 3},
    "views": {"options": {"gradient_as_bucket_view": True}},
    "without synchronisation at construction": {"options": {"init_sync": False}, "all": True},
}


@pytest.mark.parametrize(
    ("case", "world_size"),
    [*((case, 2) for case in CASES if case != "other ranks"), ("some", 3), ("all", 3), ("other ranks", 3)],
)
def test_bits_are_torchs(ranks: Any, case: str, world_size: int) -> None:
    ranks(world_size).run(play, train, CASES[case])


# ------------------------------------------------------------------ what torch does not do


@on_ranks(2)
@pytest.mark.parametrize(
    "kind",
    [
        *["plain", "dropped after the forward", "replaced after the forward"],
        *["graph of the gradients", "double", "tied"],
    ],
)
def test_the_average_is_in_place_when_backward_returns(rank: int, kind: str) -> None:
    """Average gradients where torch's would be this rank's own, or another dtype is needed."""
    torch.manual_seed(0)
    net = Net().to(torch.float64 if kind == "double" else torch.float32)
    alone = Net().to(net.inner.first.weight.dtype)
    alone.load_state_dict(net.state_dict())
    if kind == "tied":
        net.inner.other_words = nn.Embedding(6, 4)
        net.inner.other_words.weight = net.inner.words.weight
        ddp = wrapped(minddp.DistributedDataParallel, net, ["inner.other_words.weight", *DELAYED[1:]])
    else:
        ddp = wrapped(minddp.DistributedDataParallel, net)
    x = random(4, 4, rank=rank).to(net.inner.first.weight.dtype)
    for _ in range(2):
        loss = ddp(x).square().mean()
        if kind == "dropped after the forward":
            ddp.zero_grad()
        if kind == "replaced after the forward":
            net.inner.words.weight.grad = torch.zeros_like(net.inner.words.weight)
        loss.backward(create_graph=kind == "graph of the gradients")
        alone.zero_grad()
        alone(x).square().mean().backward()
        for name in DELAYED:
            mean = alone.get_parameter(name).grad
            dist.all_reduce(mean)
            torch.testing.assert_close(net.get_parameter(name).grad, mean / dist.get_world_size())
        ddp.zero_grad()


@on_ranks(2)
def test_where_all_are_delayed_there_is_nothing_to_do_for_the_reducer(rank: int) -> None:
    outer = nn.Parameter(torch.ones(4))
    ddp = wrapped_wholly(minddp.DistributedDataParallel, Net(), outer)
    output = ddp(torch.ones(4, 4) * outer)
    output.sum().backward()
    assert (len(ddp.plan.buckets), len(output._backward_hooks or ())) == (0, 0)


@on_ranks(2)
def test_a_gradient_that_comes_after_the_sign_is_named(rank: int) -> None:
    """The sign comes from the last layer, before the delayed gradients. And the next step works."""
    net = Net()
    named = [("inner.words.weight", net.inner.words.weight)]
    ddp = minddp.DistributedDataParallel(
        net, delay_all_reduce_named_params=named, param_to_hook_all_reduce=net.inner.last.weight
    )
    with pytest.raises(RuntimeError, match=r"(?s)`inner\.words\.weight`.*param_to_hook_all_reduce"):
        ddp(torch.ones(4, 4)).sum().backward()
    ddp.zero_grad()
    ddp(torch.ones(4, 4), uses_words=False).sum().backward()
    assert not net.inner.words.weight.grad.any()


# ------------------------------------------------------------------ without ranks


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)


def test_gradients_without_a_sign_stop_the_optimizer() -> None:
    pair = Pair()
    delayed = DelayedAllReduce({"second.weight": pair.second.weight}, pair.first.weight, FakeTransport())
    optimizer = torch.optim.SGD(pair.parameters(), lr=1.0)
    delayed.provide_grads()
    pair.second(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"has not arrived: second\.weight"):
        optimizer.step()
    pair.first(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_the_end_of_backward_waits() -> None:
    pair = Pair()
    transport = FakeTransport()  # acts when it is waited for
    delayed = DelayedAllReduce({"second.weight": pair.second.weight}, pair.first.weight, transport)
    delayed.provide_grads()
    pair.second(pair.first(torch.ones(1, 2))).sum().backward()
    own = torch.autograd.grad(pair.second(pair.first(torch.ones(1, 2))).sum(), pair.second.weight)[0]
    assert transport.calls == [("all_reduce", 4)]
    assert torch.equal(pair.second.weight.grad, own)


def test_its_hooks_do_nothing_once_it_is_dropped() -> None:
    pair = Pair()
    transport = FakeTransport()
    delayed = DelayedAllReduce({"second.weight": pair.second.weight}, pair.first.weight, transport)
    del delayed
    pair.second(pair.first(torch.ones(1, 2))).sum().backward()
    assert transport.calls == []


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["first.weight", "second.weight"], "`first.weight` is `param_to_hook"),
        (["second.weight", "other"], "`other` is torch.float64"),
    ],
)
def test_combinations_that_cannot_work_are_refused(names: list[str], words: str) -> None:
    pair = Pair()
    pair.other = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=words):
        wrapped(minddp.DistributedDataParallel, pair, names, trigger="first.weight")


@on_ranks(2)
def test_a_name_that_the_module_does_not_have_is_refused(rank: int) -> None:
    net = Net()
    with pytest.raises(ValueError, match=r"`words\.weight`"):
        minddp.DistributedDataParallel(
            net,
            delay_all_reduce_named_params=[("words.weight", net.inner.words.weight)],
            param_to_hook_all_reduce=net.inner.first.weight,
        )
