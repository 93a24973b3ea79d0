"""Several backwards through the outputs of one forward, and two wrappers around one parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp


class Heads(nn.Module):
    """Two outputs; with a trunk they share parameters."""

    def __init__(self, *, shares: bool) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4) if shares else nn.Identity()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.trunk(x)
        return self.left(h), self.right(h)


def grads_of(rank: int, wrapper: Callable[..., nn.Module], order: str, shares: bool) -> list[list[torch.Tensor]]:
    """`order`: the outputs through which backward is called, one call each; "b" stands for both at once."""
    torch.manual_seed(0)
    ddp = wrapper(Heads(shares=shares), find_unused_parameters=True)
    steps = []
    for step in range(4):
        ddp.zero_grad()
        torch.manual_seed(10 * step + rank)
        left, right = ddp(torch.randn(2, 4))
        losses = {"l": left.square().sum(), "r": right.square().sum()}
        for call in order:
            loss = losses["l"] + losses["r"] if call == "b" else losses[call]
            loss.backward(retain_graph=True)
        steps.append([torch.zeros(()) if p.grad is None else p.grad.clone() for p in ddp.parameters()])
    return steps


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("order", ["lr", "rl"])
def test_each_output_may_have_its_backward(ranks: Any, order: str, shares: bool) -> None:
    """Torch raises here. The gradients are those of one backward through both outputs."""
    apart = ranks(2).run(grads_of, minddp.DistributedDataParallel, order, shares)
    together = ranks(2).run(grads_of, minddp.DistributedDataParallel, "b", shares)
    for rank, (mine, yours) in enumerate(zip(apart, together, strict=True)):
        for step, pair in enumerate(zip(mine, yours, strict=True)):
            for one, other in zip(*pair, strict=True):
                torch.testing.assert_close(one, other, msg=f"rank {rank}, step {step}", rtol=1e-4, atol=1e-4)


def one_by_one(rank: int, how: str, weighs_again: bool, clears: bool) -> list[float]:
    """`.grad`, or the overlapped optimizer's steps, after backwards through two outputs of 1 and 10 times a sum."""
    layer = nn.Linear(1, 1, bias=False)
    ddp = minddp.DistributedDataParallel(
        nn.Sequential(layer, Twice()), find_unused_parameters=True, reduction="sum" if how == "sum" else "mean"
    )
    nn.init.zeros_(layer.weight)
    if how == "overlap":
        ddp.overlap_optimizer(torch.optim.SGD(ddp.parameters(), lr=1.0))
    for step in range(2):  # the second one not weighted
        ddp.zero_grad()
        if how == "weigh" and step == 0:
            ddp.weigh([3.0, 1.0][rank])
        once, tenfold = ddp(torch.tensor([[rank + 1.0]]))
        once.sum().backward(retain_graph=True)
        if step == 0 and weighs_again:
            ddp.weigh([1.0, 3.0][rank])
        if clears:
            ddp.zero_grad()
        tenfold.sum().backward()
        if how == "weigh" and step == 0:
            first = layer.weight.grad.item()
    return [first if how == "weigh" else 0.0, (layer.weight if how == "overlap" else layer.weight.grad).item()]


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, 10 * x


def message_of(rank: int, how: str) -> str:
    with pytest.raises(RuntimeError, match="holds the result of another backward of this forward") as info:
        one_by_one(rank, how, False, False)
    return str(info.value)


@pytest.mark.parametrize(
    ("how", "reason"),
    [("sum", "be summed again"), ("weigh", "`weigh` applied to that"), ("overlap", "use it twice")],
)
def test_what_cannot_be_added_to_the_first_gradients_is_an_error(ranks: Any, how: str, reason: str) -> None:
    assert all(reason in message for message in ranks(2).run(message_of, how))


@pytest.mark.parametrize(
    ("how", "weighs_again", "clears", "expected"),
    [
        ("sum", False, True, [0.0, 30.0]),
        ("weigh", True, False, [1.25 + 17.5, 16.5]),
        ("overlap", False, True, [0.0, -33.0]),
    ],
)
def test_what_can_be_added_or_is_cleared_is_not(
    ranks: Any, how: str, weighs_again: bool, clears: bool, expected: list[float]
) -> None:
    assert ranks(2).run(one_by_one, how, weighs_again, clears) == [expected] * 2


@pytest.mark.parametrize("order", ["b", "bb"])
def test_a_second_backward_through_the_same_outputs_stays_local_as_in_torch(ranks: Any, order: str) -> None:
    ours, theirs = (
        ranks(3).run(grads_of, wrapper, order, False) for wrapper in (minddp.DistributedDataParallel, TorchDDP)
    )
    for mine, yours in zip(ours, theirs, strict=True):
        for pair in zip(mine, yours, strict=True):
            assert all(map(torch.equal, *pair))


def two_wrappers(rank: int, wrapper: Callable[..., nn.Module]) -> list[torch.Tensor]:
    """One large layer in two wrappers, whose gradients are kept from step to step and set to zero in place."""
    torch.manual_seed(0)
    shared = nn.Linear(128, 256)
    first, second = wrapper(nn.Sequential(shared)), wrapper(nn.Sequential(shared, nn.Linear(256, 8)))
    seen = []
    for step in range(5):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(2, 128)
        (first(x).sum() + second(x).square().sum() if step else first(x).sum()).backward()
        seen.append(shared.weight.grad.clone())
        for param in (*first.parameters(), *second.parameters()):
            if param.grad is not None:
                param.grad.zero_()
    return seen


def test_aliased_gradients_are_not_scaled_under_another_wrapper(ranks: Any) -> None:
    """`.grad` lies in the first wrapper's bucket since the last step; the second one packs it unscaled."""
    ours = ranks(2).run(two_wrappers, minddp.DistributedDataParallel)
    theirs = ranks(2).run(two_wrappers, TorchDDP)
    for mine, yours in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, mine, yours))
