"""Outputs that are views, objects or shared memory, further autograd calls, and wrappers within checkpoints.

Each script is played with torch's DDP, with minddp's, and with the bare module, whose gradients are then averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import minddp

STEPS = 4
Gradients = list[torch.Tensor | None]


class Opaque:
    """An output in which no wrapper finds a tensor."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class Net(nn.Module):
    """Three layers. `output` makes the forward's result from the last activation."""

    def __init__(self, output: Callable[[torch.Tensor], Any], *, checkpoints: bool = False):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.output = output
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x).tanh()
        hidden = checkpoint(self.second, hidden, use_reentrant=True) if self.checkpoints else self.second(hidden)
        return self.output(self.third(hidden))


class TwoHeads(nn.Module):
    """Two outputs; the first one does not depend on `right`."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


class Bare(nn.Module):
    """No wrapper: gradients stay local."""

    def __init__(self, module: nn.Module, **_options: Any):
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)


def backward_of_view(ddp: nn.Module, x: torch.Tensor) -> None:
    ddp(x).mul_(2).square().mean().backward()


def backward_of_object(ddp: nn.Module, x: torch.Tensor) -> None:
    ddp(x).tensor.square().mean().backward()


def write_to_detached(ddp: nn.Module, x: torch.Tensor) -> None:
    output, detached = ddp(x)
    detached.mul_(2)
    output.square().mean().backward()


def hessian_vector_product(ddp: nn.Module, x: torch.Tensor) -> None:
    loss = ddp(x).square().mean()
    params = list(ddp.parameters())
    grads = torch.autograd.grad(loss, params, create_graph=True)
    torch.autograd.grad(grads, params, [torch.ones_like(grad) for grad in grads], retain_graph=True)
    loss.backward()


def gradient_penalty(ddp: nn.Module, x: torch.Tensor) -> None:
    output = ddp(x.requires_grad_())
    [grad] = torch.autograd.grad(output.sum(), x, create_graph=True)
    (output.square().mean() + grad.square().mean()).backward()


def within_checkpoint(ddp: nn.Module, x: torch.Tensor) -> None:
    checkpoint(ddp, x.requires_grad_(), use_reentrant=True).square().mean().backward()


def backward_each(ddp: nn.Module, x: torch.Tensor) -> None:
    left, right = ddp(x)
    left.square().mean().backward(retain_graph=True)
    right.square().mean().backward()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def view(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * 2).t().t()


def with_detached(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor, tensor.detach()


def with_checkpoint() -> nn.Module:
    return Net(plain, checkpoints=True)


def play(
    rank: int,
    wrapper: Callable[..., nn.Module],
    make: Callable[[], nn.Module],
    step: Callable[[nn.Module, torch.Tensor], None],
    options: dict[str, bool],
) -> list[Gradients]:
    torch.manual_seed(0)
    ddp = wrapper(make(), **options)
    steps: list[Gradients] = []
    for number in range(STEPS):
        ddp.zero_grad()
        torch.manual_seed(10 * number + rank)
        step(ddp, torch.randn(3, 4))
        if wrapper is Bare:
            for param in ddp.parameters():
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        steps.append(grads_of(ddp))
    return steps


def grads_of(module: nn.Module) -> Gradients:
    return [None if param.grad is None else param.grad.clone() for param in module.parameters()]


def is_close(one: Gradients, other: Gradients) -> bool:
    return all(a is not None and b is not None and torch.allclose(a, b) for a, b in zip(one, other, strict=True))


def are_same(one: list[Gradients], other: list[Gradients]) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b))
        for step in zip(one, other, strict=True)
        for a, b in zip(*step, strict=True)
    )


STATIC, FINDS = {"static_graph": True}, {"find_unused_parameters": True}


def net() -> nn.Module:
    return Net(plain)


def net_of_view() -> nn.Module:
    return Net(view)


def net_of_object() -> nn.Module:
    return Net(Opaque)


def net_of_detached() -> nn.Module:
    return Net(with_detached)


@pytest.mark.parametrize("options", [{}, STATIC, FINDS], ids=str)
@pytest.mark.parametrize(
    ("make", "step"), [(net_of_view, backward_of_view), (net, within_checkpoint)], ids=["view", "checkpoint"]
)
def test_bits_are_those_of_torch(ranks: Any, make: Any, step: Any, options: dict[str, bool]) -> None:
    torchs = ranks(2).run(play, TorchDDP, make, step, options)
    ours = ranks(2).run(play, minddp.DistributedDataParallel, make, step, options)
    for rank in range(2):
        assert are_same(ours[rank], torchs[rank]), rank


@pytest.mark.parametrize("options", [{}, STATIC], ids=str)
def test_a_checkpoint_of_the_wrapper_may_contain_a_checkpoint(ranks: Any, options: dict[str, bool]) -> None:
    """The recorded backward ended with the inner checkpoint's: "your training graph has changed"."""
    torchs = ranks(2).run(play, TorchDDP, with_checkpoint, within_checkpoint, options)
    ours = ranks(2).run(play, minddp.DistributedDataParallel, with_checkpoint, within_checkpoint, options)
    assert are_same(ours[0], torchs[0])


@pytest.mark.parametrize(
    ("make", "step", "options", "torch_is_right"),
    [
        (net, hessian_vector_product, STATIC, [False] * STEPS),
        (net, gradient_penalty, STATIC, [False] * STEPS),
        (net_of_object, backward_of_object, STATIC, [False] * STEPS),
        (net_of_detached, write_to_detached, STATIC, [False] + [True] * (STEPS - 1)),
        (net_of_detached, write_to_detached, FINDS, [False] * STEPS),
    ],
    ids=["hessian", "penalty", "object", "detached", "detached, find unused"],
)
def test_gradients_are_those_of_the_bare_module_where_torchs_are_not(
    ranks: Any, make: Any, step: Any, options: dict[str, bool], torch_is_right: list[bool]
) -> None:
    """See docs/differences.md: torch takes `autograd.grad` for the backward, or returns copies of the outputs."""
    averages, torchs, ours = (
        ranks(2).run(play, wrapper, make, step, options)[1]
        for wrapper in (Bare, TorchDDP, minddp.DistributedDataParallel)
    )
    assert [is_close(*pair) for pair in zip(ours, averages, strict=True)] == [True] * STEPS
    assert [is_close(*pair) for pair in zip(torchs, averages, strict=True)] == torch_is_right


def test_torch_keeps_the_gradients_of_a_second_backward_local(ranks: Any) -> None:
    one, other = ranks(2).run(play, TorchDDP, TwoHeads, backward_each, STATIC)
    assert [is_close(*pair) for pair in zip(one, other, strict=True)] == [False] * STEPS


def raised_by_second_backward(rank: int, wrapper: Callable[..., nn.Module]) -> str:
    ddp = wrapper(TwoHeads(), static_graph=True)
    with pytest.raises(RuntimeError, match="backward") as error:
        backward_each(ddp, torch.randn(3, 4))
        ddp(torch.randn(3, 4))  # where torch raises
    return str(error.value)


def test_a_backward_for_each_output_is_an_error_in_a_static_graph(ranks: Any) -> None:
    """The second one's gradients stayed local. Torch raises, too, if not for this reason."""
    for text in ranks(2).run(raised_by_second_backward, minddp.DistributedDataParallel):
        assert "gradient of `right.bias`, from another output, would stay local" in text


def averages_seen_by_callbacks(rank: int, wrapper: Callable[..., nn.Module], place: str) -> list[Gradients]:
    """`.grad` as a callback sees it that a hook of the last activation or of a weight queues for the end."""
    seen: list[Gradients] = []

    def queue(_grad: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: seen.append(grads_of(module)))

    def hooked(tensor: torch.Tensor) -> torch.Tensor:
        if place == "output":
            tensor.register_hook(queue)
        return tensor

    torch.manual_seed(0)
    module = Net(hooked)
    if place == "weight":
        module.third.weight.register_hook(queue)
    ddp = wrapper(module, static_graph=True)
    for number in range(2):
        ddp.zero_grad()
        torch.manual_seed(10 * number + rank)
        ddp(torch.randn(3, 4)).square().mean().backward()
    return seen


@pytest.mark.parametrize(
    ("place", "torch_sees", "we_see"),
    [("output", [True, False], [True, False]), ("weight", [True, False], [True, True])],
)
def test_callbacks_for_the_end_of_backward(
    ranks: Any, place: str, torch_sees: list[bool], we_see: list[bool]
) -> None:
    """A callback that is queued before the wrapper's reads this rank's gradients. See docs/differences.md."""
    for wrapper, expected in ((TorchDDP, torch_sees), (minddp.DistributedDataParallel, we_see)):
        one, other = ranks(2).run(averages_seen_by_callbacks, wrapper, place)
        assert [is_close(*pair) for pair in zip(one, other, strict=True)] == expected, wrapper
