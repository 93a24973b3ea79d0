"""Several backwards for one forward, and callbacks for the end of a backward: what torch does otherwise.

Where both do the same: `tests/parity/test_fixed_scripts.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from tests.modules import Heads, grads_by_name
from tests.ranks import of_all_ranks, on_ranks


@on_ranks(2)
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(
    "orders",
    [
        *(("lr", "lr"), ("rl", "rl"), ("br", "lr"), ("lb", "bl"), ("ll", "lr"), ("lr", "rl")),
        *(("Lrl", "Lrl"), ("Lrl", "rl"), ("rLl", "rl"), ("LRlr", "lr"), ("rLl", "rLl")),
    ],
)
def test_each_output_may_have_its_backward(rank: int, orders: tuple[str, str], shares: bool) -> None:
    """`orders`: on each rank the outputs of its backwards; "b" stands for both at once, "L" for `autograd.grad`.

    The gradients are the mean of what the ranks compute alone. Torch raises where outputs share parameters. All
    ranks reduce the second backward if the first has left an output on one of them.
    """
    torch.manual_seed(0)
    alone = Heads(nn.Linear(2, 2) if shares else None)
    ddp = minddp.DistributedDataParallel(copy.deepcopy(alone), find_unused_parameters=True)
    for step in range(4):
        ddp.zero_grad()
        alone.zero_grad()
        x = torch.randn(2, 2, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()
        for module in (ddp, alone):
            losses = dict(zip("lr", (output.square().sum() for output in module(x)), strict=True))
            losses["b"] = losses["l"] + losses["r"]
            for call in orders[rank]:
                if call in losses:
                    losses[call].backward(retain_graph=True)
                else:  # reaches no parameter, so that the output is still to have its backward
                    torch.autograd.grad(losses[call.lower()], x, retain_graph=True)
        for wrapped, param in zip(ddp.module.parameters(), alone.parameters(), strict=True):
            total = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(total)
            torch.testing.assert_close(wrapped.grad, total / 2)


def one_by_one(rank: int, how: str, weighs_again: bool, clears: bool) -> list[float]:
    """`.grad`, or the overlapped optimizer's steps, after backwards through two outputs of 1 and 10 times a sum."""
    layer = nn.Linear(1, 1, bias=False)
    ddp = minddp.DistributedDataParallel(nn.Sequential(layer, Twice()), find_unused_parameters=True)
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


@on_ranks(2)
@pytest.mark.parametrize(("how", "reason"), [("weigh", "`weigh` applied to that"), ("overlap", "use it twice")])
def test_what_cannot_be_added_to_the_first_gradients_is_an_error(rank: int, how: str, reason: str) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)holds the result of another backward of this forward.*{reason}"):
        one_by_one(rank, how, False, False)


@on_ranks(2)
@pytest.mark.parametrize(
    ("how", "weighs_again", "clears", "expected"),
    [
        ("weigh", True, False, [1.25 + 17.5, 16.5]),
        ("overlap", False, True, [0.0, -33.0]),
    ],
)
def test_what_can_be_added_or_is_cleared_is_not(
    rank: int, how: str, weighs_again: bool, clears: bool, expected: list[float]
) -> None:
    assert one_by_one(rank, how, weighs_again, clears) == expected


@on_ranks(2)
def test_a_backward_for_each_output_is_an_error_in_a_static_graph(rank: int) -> None:
    """The second one's gradients stayed local, as torch's do."""
    ddp = minddp.DistributedDataParallel(Heads(), static_graph=True)
    with pytest.raises(RuntimeError, match=r"gradient of `right\.bias`, from another output, would stay local"):
        left, right = ddp(torch.randn(3, 2))
        left.square().mean().backward(retain_graph=True)
        right.square().mean().backward()
        ddp(torch.randn(3, 2))


@on_ranks(2)
@pytest.mark.parametrize("place", [0, 1])
def test_a_further_backward_that_reaches_no_parameter_leaves_the_next_one_local(rank: int, place: int) -> None:
    """After a reduced backward that has left an output, one rank asks for the gradient of its input."""
    ddp = minddp.DistributedDataParallel(Heads(nn.Linear(2, 2)), find_unused_parameters=True)
    for step in range(2):
        x = torch.randn(2, 2, requires_grad=True)
        outputs = ddp(x)
        outputs[0].sum().backward(retain_graph=True)
        if rank == 0:
            torch.autograd.grad(outputs[place].sum(), x, retain_graph=True)
        ddp.zero_grad()
        with ddp.no_sync():
            sum(output.sum() * (rank + 1) for output in ddp(torch.ones(1, 2))).backward()
        assert torch.equal(ddp.module.left.bias.grad, torch.full([2], rank + 1.0)), step


@on_ranks(2)
@pytest.mark.parametrize("uses_all", [False, True])
def test_a_further_backward_on_one_rank_alone_is_an_error_on_all(rank: int, uses_all: bool) -> None:
    """It would be averaged with the next step of the other rank, which may use all parameters."""
    ddp = minddp.DistributedDataParallel(Heads(nn.Linear(2, 2)), find_unused_parameters=True)
    left, right = ddp(torch.ones(1, 2))
    left.sum().backward(retain_graph=True)
    number = "a further" if rank == 0 else "the first"
    match = f"On rank {rank} this is {number} backward of a forward, but it is the first one on 1 of 2 ranks"
    with pytest.raises(RuntimeError, match=match):
        if rank == 0:
            right.sum().backward()
        ddp.zero_grad()
        left, right = ddp(torch.ones(1, 2))
        (left + right if uses_all else left).sum().backward()
    with pytest.raises(RuntimeError, match="gradients that are not averaged"):
        torch.optim.SGD(ddp.parameters()).step()


@on_ranks(2)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("num_parts", [2, 4])
def test_a_backward_may_be_split_by_its_inputs(rank: int, num_parts: int, views: bool) -> None:
    """For `find_unused_parameters` the engine leaves out the others. Torch awaits them."""
    found = []
    for wrapper in (TorchDDP, minddp.DistributedDataParallel):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        ddp = wrapper(module, find_unused_parameters=True, gradient_as_bucket_view=views)
        params = [*module.parameters()]
        for _ in range(3):
            ddp.zero_grad()
            loss = ddp(torch.full((1, 3), rank + 1.0)).square().sum()
            for part in range(num_parts):
                loss.backward(inputs=params[part::num_parts], retain_graph=True)
        found.append([param.grad for param in params])
    assert all(map(torch.equal, *found))


@on_ranks(2)
@pytest.mark.parametrize(("wrapper", "is_averaged"), [(TorchDDP, False), (minddp.DistributedDataParallel, True)])
def test_a_second_backward_while_parameters_are_unused(
    rank: int, wrapper: Callable[..., nn.Module], is_averaged: bool
) -> None:
    module = nn.Linear(1, 1)
    module.unused = nn.Parameter(torch.ones(1))
    ddp = wrapper(module, find_unused_parameters=True)
    loss = ddp(torch.full((1, 1), rank + 1.0)).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert module.weight.grad.item() == 1.5 + (1.5 if is_averaged else rank + 1)


@on_ranks(2)
def test_what_no_rank_has_used_is_awaited_once(rank: int) -> None:
    """When all are reduced, a further backward stays local, as torch's."""
    ddp = minddp.DistributedDataParallel(nn.Linear(1, 1), find_unused_parameters=True)
    loss = ddp(torch.full((1, 1), rank + 1.0)).sum()
    for params in ([ddp.module.weight], [ddp.module.bias], [ddp.module.weight]):
        loss.backward(inputs=params, retain_graph=True)
    assert ddp.module.weight.grad.item() == 1.5 + rank + 1


# ------------------------------------------------------------------ callbacks for the end of backward


@on_ranks(2)
@pytest.mark.parametrize(
    ("wrapper", "place", "sees_averages"),
    [
        (TorchDDP, "output", [True, False]),
        (minddp.DistributedDataParallel, "output", [True, False]),
        (TorchDDP, "weight", [True, False]),
        (minddp.DistributedDataParallel, "weight", [True, True]),
    ],
)
def test_callbacks_for_the_end_of_backward(
    rank: int, wrapper: Callable[..., nn.Module], place: str, sees_averages: list[bool]
) -> None:
    """`.grad` as a callback sees it that a hook of the output or of a weight queues for the end, in two steps.

    A callback that is queued before the wrapper's reads this rank's gradients. See docs/differences.md.
    """
    seen: list[dict[str, Any]] = []

    def queue(_grad: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: seen.append(grads_by_name(module)))

    def hook_output(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(queue)

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    if place == "weight":
        module[-1].weight.register_hook(queue)
    else:
        module.register_forward_hook(hook_output)
    ddp = wrapper(module, static_graph=True)
    for step in range(2):
        ddp.zero_grad()
        torch.manual_seed(10 * step + rank)
        ddp(torch.randn(3, 4)).square().mean().backward()
    one, other = of_all_ranks(seen)
    assert [
        all(torch.allclose(mine[name], yours[name]) for name in mine)
        for mine, yours in zip(one, other, strict=True)
    ] == sees_averages
