"""Optimizers that step during backward, as soon as a bucket is reduced: the same bits as with torch's wrapper.

`torch.distributed.optim` is imported on the ranks only: the import compiles with torch.jit, and warns of that.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import minddp
from tests.features.beside import Trail, Wrap, play, random, snapshot
from tests.features.streams import streams_of_a_cpu

SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
ADAMW = (torch.optim.AdamW, {"lr": 0.01})
VIEWS = {"gradient_as_bucket_view": True}


class Net(nn.Module):
    """The last layer stays as it is where an optimizer is asked to leave it out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.middle = nn.Linear(7, 7)
        self.last = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


def train(wrap: Wrap, rank: int, case: dict[str, Any]) -> Trail:
    torch.manual_seed(0)
    net = Net()
    optimizer_class, arguments = case["optimizer"]
    stepped = [p for name, p in net.named_parameters() if not case.get("leaves_out_last") or "last" not in name]
    if case["how"] == "in backward, then wrapped":
        _apply_in_backward(optimizer_class, stepped, arguments)
    ddp = wrap(net, bucket_cap_mb=0.0001, **case.get("options", {}))
    if case["how"] == "wrapped, then in backward":
        _apply_in_backward(optimizer_class, stepped, arguments)
    elif case["how"] == "fused":
        chosen = {"optim_params": stepped} if case.get("leaves_out_last") else {}
        ddp._register_fused_optim(optimizer_class, **chosen, **arguments)
    others = torch.optim.SGD(net.last.parameters(), lr=0.1)
    trail = []
    for step in range(4):
        before = snapshot(ddp)
        ddp(random(4, 6, rank=rank, step=step)).square().sum().backward()
        trail.append(snapshot(ddp))
        moved = {name for name, _ in net.named_parameters() if differs(trail[-1], before, f"module.{name}")}
        assert moved == {name for name, param in net.named_parameters() if any(param is p for p in stepped)}
        if case.get("leaves_out_last"):
            others.step()
        ddp.zero_grad()
    return trail


def _apply_in_backward(optimizer_class: type, params: list[Any], arguments: dict[str, Any]) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(optimizer_class, params, arguments)


def differs(one: dict[str, Any], other: dict[str, Any], name: str) -> bool:
    return not torch.equal(one[name], other[name])


def _play(rank: int, case: dict[str, Any]) -> list[Any]:
    with streams_of_a_cpu():
        return [taken["module.first.weight"] for taken in play(rank, train, case)]


@pytest.mark.parametrize(
    "case",
    [
        {"how": "in backward, then wrapped", "optimizer": SGD},
        {"how": "wrapped, then in backward", "optimizer": ADAMW},
        {"how": "wrapped, then in backward", "optimizer": SGD, "leaves_out_last": True, "options": VIEWS},
        {"how": "fused", "optimizer": ADAMW},
        {"how": "fused", "optimizer": SGD, "leaves_out_last": True},
        {"how": "fused", "optimizer": SGD, "options": VIEWS | {"static_graph": True}},
    ],
    ids=str,
)
def test_steps_in_backward_have_torchs_bits(ranks: Any, case: dict[str, Any]) -> None:
    one, other = ranks(2).run(_play, case)
    assert all(map(torch.equal, one, other))


def _gradients_of_last(rank: int, cls: type) -> list[list[float]]:
    case = {"how": "wrapped, then in backward", "optimizer": SGD, "leaves_out_last": True}
    with streams_of_a_cpu():
        return [taken["module.last.bias.grad"].tolist() for taken in train(cls, rank, case)]


def test_parameters_that_are_not_stepped_in_backward_are_averaged_all_the_same(ranks: Any) -> None:
    """Without views torch leaves them with each rank's own gradients."""
    one, other = ranks(2).run(_gradients_of_last, minddp.DistributedDataParallel)
    assert one == other
    one, other = ranks(2).run(_gradients_of_last, nn.parallel.DistributedDataParallel)
    assert one != other, "torch has been mended: extend the parity test above"


def _refused(rank: int, how: str) -> str:
    from torch.nn.parallel.distributed import _MixedPrecision

    ddp = minddp.DistributedDataParallel(Net(), mixed_precision=_MixedPrecision(torch.bfloat16))
    with pytest.raises(RuntimeError) as caught:
        if how == "fused":
            ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
        else:
            _apply_in_backward(torch.optim.SGD, list(ddp.parameters()), {"lr": 0.1})
            ddp(torch.ones(1, 6))
    return str(caught.value)


@pytest.mark.parametrize("how", ["fused", "in backward"])
def test_steps_in_backward_would_miss_the_originals_of_mixed_precision(ranks: Any, how: str) -> None:
    assert "`mixed_precision` exclude each other: a hook may step an optimizer" in ranks(2).run(_refused, how)[0]
