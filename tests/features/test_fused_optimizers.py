"""Optimizers that step during backward, as soon as a bucket is reduced: the same bits as with torch's wrapper.

`torch.distributed.optim` is imported on the ranks only: the import compiles with torch.jit, and warns of that.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import minddp
from tests.features.beside import Trail, Wrap, play, random, snapshot, streams_of_a_cpu
from tests.ranks import of_all_ranks, on_ranks

SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
ADAMW = (torch.optim.AdamW, {"lr": 0.01})
ADAM = (torch.optim.Adam, {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6})
DECAY = (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1})
VIEWS = {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}
SKIPPED_BUCKETS = {"skip_all_reduce_unused_params": True, "bucket_cap_mb": 1e-6}
SKIPS = {"how": "wrapped, then in backward", "optimizer": DECAY, "skips_middle": True}


class Net(nn.Module):
    """The last layer stays as it is where an optimizer is asked to leave it out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.middle = nn.Linear(7, 7)
        self.last = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor, *, skips_middle: bool) -> torch.Tensor:
        y = self.first(x).tanh()
        return self.last(y if skips_middle else self.middle(y).tanh())


def train(wrap: Wrap, rank: int, case: dict[str, Any]) -> Trail:
    torch.manual_seed(0)
    net = Net()
    optimizer_class, arguments = case["optimizer"]
    stepped = [p for name, p in net.named_parameters() if not case.get("leaves_out_last") or "last" not in name]
    moving = {name for name, p in net.named_parameters() if any(p is q for q in stepped)}
    if case["how"] == "in backward, then wrapped":
        _apply_in_backward(optimizer_class, stepped, arguments)
    ddp = wrap(net, **{"bucket_cap_mb": 0.0001, **case.get("options", {})})
    if case["how"] == "wrapped, then in backward":
        _apply_in_backward(optimizer_class, stepped, arguments)
    elif case["how"] == "fused":
        chosen = {"optim_params": stepped} if case.get("leaves_out_last") else {}
        ddp._register_fused_optim(optimizer_class, **chosen, **arguments)
    others = torch.optim.SGD(net.last.parameters(), lr=0.1)
    trail = []
    for step in range(4):
        before = snapshot(ddp)
        x = random(4, 6, rank=rank, step=step)
        ddp(x, skips_middle=case.get("skips_middle", False)).square().sum().backward()
        trail.append(snapshot(ddp))
        moved = {name for name, param in net.named_parameters() if not torch.equal(param, before[f"module.{name}"])}
        assert moved == {name for name in moving if case.get("stays", "none") not in name}
        if "backward" in case["how"]:
            assert ddp._get_ddp_logging_data()["comm_hook"].endswith("apply_optim_in_backward_hook")
            assert all(param.grad is None for param in stepped)
        if case.get("leaves_out_last"):
            others.step()
        ddp.zero_grad()
    return trail


def _apply_in_backward(optimizer_class: type, params: list[Any], arguments: dict[str, Any]) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(optimizer_class, params, arguments)


@on_ranks(lambda case: case.get("ranks", 2))
@pytest.mark.parametrize(
    "case",
    [
        {"how": "in backward, then wrapped", "optimizer": SGD},
        {"how": "wrapped, then in backward", "optimizer": ADAMW},
        {"how": "wrapped, then in backward", "optimizer": SGD, "leaves_out_last": True, "options": VIEWS},
        {"how": "wrapped, then in backward", "optimizer": SGD, "ranks": 3},
        {**SKIPS, "options": UNUSED},
        {**SKIPS, "stays": "middle", "options": UNUSED | VIEWS},
        {**SKIPS, "stays": "middle", "options": UNUSED | SKIPPED_BUCKETS},
        {"how": "in backward, then wrapped", "optimizer": SGD, "options": {"static_graph": True}},
        {"how": "fused", "optimizer": ADAMW},
        {"how": "fused", "optimizer": ADAM, "leaves_out_last": True},
        {"how": "fused", "optimizer": SGD, "leaves_out_last": True},
        {"how": "fused", "optimizer": SGD, "options": VIEWS | {"static_graph": True}},
    ],
    ids=str,
)
def test_steps_in_backward_have_torchs_bits(rank: int, case: dict[str, Any]) -> None:
    with streams_of_a_cpu():
        trail = play(rank, train, case)
    weights = torch.stack([taken["module.first.weight"] for taken in trail])
    assert all(torch.equal(weights, others) for others in of_all_ranks(weights))


@on_ranks(2)
def test_an_exception_in_backward_steps_nothing(rank: int) -> None:
    """The second backward raises after all buckets but that of the first layer have been launched."""
    torch.manual_seed(0)
    net = Net()
    ddp = minddp.DistributedDataParallel(net, bucket_cap_mb=0.0001)
    _apply_in_backward(torch.optim.SGD, list(net.parameters()), {"lr": 0.1})

    trail = []
    for step in range(3):
        handle = net.first.weight.register_hook(lambda gradient, step=step: 1 / 0 if step == 1 else gradient)
        with pytest.raises(ZeroDivisionError) if step == 1 else nullcontext():
            ddp(random(4, 6, rank=rank, step=step), skips_middle=False).square().sum().backward()
        handle.remove()
        trail.append(snapshot(ddp))
        ddp.zero_grad()
    weights = [taken["module.middle.weight"] for taken in trail]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert all(taken["module.middle.weight.grad"] is None for taken in (trail[0], trail[2]))


@on_ranks(2)
@pytest.mark.parametrize("cls", [minddp.DistributedDataParallel, nn.parallel.DistributedDataParallel])
def test_parameters_that_are_not_stepped_in_backward_are_averaged_all_the_same(rank: int, cls: Any) -> None:
    """Without views torch leaves them with each rank's own gradients. If it is mended extend the test above."""
    case = {"how": "wrapped, then in backward", "optimizer": SGD, "leaves_out_last": True}
    with streams_of_a_cpu():
        grads = [taken["module.last.bias.grad"].tolist() for taken in train(cls, rank, case)]
    one, other = of_all_ranks(grads)
    assert (one == other) == (cls is minddp.DistributedDataParallel)


@on_ranks(2)
@pytest.mark.parametrize("how", ["fused", "in backward"])
def test_steps_in_backward_would_miss_the_originals_of_mixed_precision(rank: int, how: str) -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    ddp = minddp.DistributedDataParallel(Net(), mixed_precision=_MixedPrecision(torch.bfloat16))
    with pytest.raises(RuntimeError, match="`mixed_precision` exclude each other: a hook may step an optimizer"):
        if how == "fused":
            ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
        else:
            _apply_in_backward(torch.optim.SGD, list(ddp.parameters()), {"lr": 0.1})
            ddp(torch.ones(1, 6), skips_middle=False)
