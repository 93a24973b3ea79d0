"""The public wrapper beside torch's: attributes, state, copies, buffers, no_sync. On two real ranks."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from tests.ranks import of_all_ranks, on_ranks

BOTH = (TorchDDP, minddp.DistributedDataParallel)


class Net(nn.Module):
    """A frozen and a tied weight, BatchNorm and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.body.weight
        self.register_buffer("mark", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.norm(self.body(x))))


def build(cls: type, seed: int = 0, **arguments: Any) -> Any:
    torch.manual_seed(seed)
    return cls(Net(), **arguments)


def inputs(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def train(ddp: Any, rank: int, steps: int = 2) -> dict[str, torch.Tensor]:
    """Parameters, buffers and gradients after some steps."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(inputs(rank, step)).square().sum().backward()
        optimizer.step()
    grads = {f"{name}.grad": p.grad for name, p in ddp.named_parameters() if p.grad is not None}
    return {key: value.clone() for key, value in {**ddp.state_dict(), **grads}.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# ------------------------------------------------------------------ attributes and state


@on_ranks(2)
def test_state_goes_back_and_forth_between_torchs_and_ours(rank: int) -> None:
    theirs, ours = (build(cls, seed) for seed, cls in enumerate(BOTH))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(key.startswith("module.") for key in ours.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert not same(ours.state_dict(), theirs.state_dict())
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    assert same(ours.state_dict(), theirs.state_dict())
    ours.module.load_state_dict({k.removeprefix("module."): v for k, v in theirs.state_dict().items()})
    assert same(train(ours, rank), train(theirs, rank))


@on_ranks(2)
def test_the_plan_holds_tied_weights_once_and_frozen_ones_not_at_all(rank: int) -> None:
    ddp = build(minddp.DistributedDataParallel)
    assert [spec.name for spec in ddp.plan.params] == ["body.weight", "body.bias", "norm.weight", "norm.bias"]
    train(ddp, rank)
    assert ddp.module.frozen.weight.grad is None
    assert ddp.module.head.weight.grad is ddp.module.body.weight.grad
    text = str(ddp.plan)
    assert of_all_ranks(text) == [text] * 2
    assert text.count("body.weight") == 1


@on_ranks(2)
def test_arguments_and_outputs_pass_through_as_they_are(rank: int) -> None:
    class Flexible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *more: Any, scale: float = 1.0, **rest: Any) -> dict[str, Any]:
            return {"out": self.layer(x) * scale, "more": more, "rest": rest}

    ddp = minddp.DistributedDataParallel(Flexible())
    output = ddp(torch.ones(1, 4), "a", None, scale=2.0, flag=True)
    assert [output["more"], output["rest"], output["out"].shape] == [("a", None), {"flag": True}, (1, 4)]


# ------------------------------------------------------------------ training, copies and pickles


@on_ranks(2)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_copies_train_like_the_original(rank: int, steps_before: int) -> None:
    original = build(minddp.DistributedDataParallel)
    train(original, rank, steps_before)
    original.zero_grad()
    clones = [copy.deepcopy(original), pickle.loads(pickle.dumps(original))]
    stream = io.BytesIO()
    torch.save(original, stream)
    stream.seek(0)
    clones.append(torch.load(stream, weights_only=False))
    before = {key: value.clone() for key, value in original.state_dict().items()}
    results = []
    for clone in clones:
        assert type(clone) is minddp.DistributedDataParallel
        assert clone.module is not original.module
        assert clone.process_group is dist.group.WORLD
        results.append(train(clone, rank))
        assert same(original.state_dict(), before), "training a copy leaves the original alone"
    expected = train(original, rank)
    assert all(same(result, expected) for result in results)


@on_ranks(2)
def test_no_copies_with_another_group_than_the_default(rank: int) -> None:
    group = dist.new_group([0, 1])
    for cls in BOTH:
        ddp = build(cls, process_group=group)
        for make_copy in (copy.deepcopy, pickle.dumps):
            with pytest.raises(RuntimeError, match="DDP Pickling/Unpickling are only supported when using DDP"):
                make_copy(ddp)


# ------------------------------------------------------------------ no_sync


@on_ranks(2)
def test_no_sync_restores_also_after_an_exception(rank: int) -> None:
    ddp = build(minddp.DistributedDataParallel)
    with ddp.no_sync():
        assert not ddp.require_backward_grad_sync
        with ddp.no_sync():
            pass
        assert not ddp.require_backward_grad_sync
    assert ddp.require_backward_grad_sync
    with suppress(KeyError), ddp.no_sync():
        raise KeyError
    assert ddp.require_backward_grad_sync


# ------------------------------------------------------------------ buffers


@on_ranks(2)
def test_buffers_come_before_a_forward_unless_the_last_was_without_grad_or_local(rank: int) -> None:
    """Training (t), evaluation under no_grad (e), local under no_sync (l)."""
    for cls in BOTH:
        ddp, are_of_rank_0 = build(cls), ""
        for kind in "tettltleet":
            ddp.module.mark.fill_(rank)
            with {"t": nullcontext, "e": torch.no_grad, "l": ddp.no_sync}[kind]():
                ddp(inputs(rank))
            are_of_rank_0 += "yes " if ddp.module.mark == 0 else "no "
        assert rank == 0 or are_of_rank_0 == "yes yes no yes yes no yes no no no "


def synchronised(cls: type, rank: int, arguments: dict[str, Any]) -> tuple[float, ...]:
    """Two parameters and a buffer, of value `rank` before construction, the buffer also before the forward."""
    torch.manual_seed(0)
    net = Net()
    values = [net.body.bias, net.frozen.bias, net.mark]
    with torch.no_grad():
        for value in values:
            value.fill_(rank)
    ddp = cls(net, **arguments)
    seen = [float(value.detach().mean()) for value in values]
    net.mark.fill_(rank)
    ddp(inputs(rank))
    return (*seen, *(float(value.detach().mean()) for value in values))


@on_ranks(2)
def test_what_is_synchronised_when_is_as_in_torch(rank: int) -> None:
    different = set()
    for init, broadcast, forward in itertools.product([True, False], [None, True, False], [None, True, False]):
        arguments = {"init_sync": init, "broadcast_buffers": broadcast, "forward_sync_buffers": forward}
        theirs, ours = (synchronised(cls, rank, arguments) for cls in BOTH)
        assert ours == theirs, arguments
        different.add(ours)
    assert len(different) == (1 if rank == 0 else 5), "the arguments matter"


@on_ranks(2)
def test_a_profile_has_the_spans_that_torchs_has(rank: int) -> None:
    spans = []
    for cls in BOTH:
        ddp = build(cls)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ddp(inputs(rank)).sum().backward()
        spans.append({event.key for event in profile.key_averages() if event.is_user_annotation})
    assert "DistributedDataParallel.forward" in spans[0]
    assert spans[0] == spans[1]


@on_ranks(2)
@pytest.mark.parametrize("names", [["body.weight"], ["head.weight"], ["body.weight", "head.weight"]])
def test_a_tied_parameter_is_left_out_only_if_it_is_ignored_everywhere(rank: int, names: list[str]) -> None:
    grads = []
    for cls in BOTH:
        torch.manual_seed(0)
        net = Net()
        net._ddp_params_and_buffers_to_ignore = names
        ddp = cls(net)
        ddp(inputs(rank)).square().sum().backward()
        grads.append(net.body.weight.grad)
    assert torch.equal(*grads)
    assert torch.equal(*of_all_ranks(grads[1])) == (len(names) == 1)
