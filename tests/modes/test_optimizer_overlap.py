"""Optimizers that are stepped bucket by bucket: equal bits, and nothing stepped twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import minddp
from minddp.modes.optimizer_overlap import OverlappedOptimizer
from tests.fakes import FakeDDP
from tests.ranks import on_ranks

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "Adam": partial(torch.optim.Adam, lr=1e-2),
    "AdamW one by one": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2, foreach=True),
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, the second without weight decay and with a learning rate of its own."""
    params = list(model.parameters())
    return [{"params": params[:5]}, {"params": params[5:], "lr": 3e-3, "weight_decay": 0.0}]


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("views", [False, True])
def test_equal_bits_in_parameters_and_state(rank: int, name: str, views: bool) -> None:
    """Whether it steps in backward or after it, in each of several steps."""
    options = {"bucket_cap_mb_list": [0.0003], "gradient_as_bucket_view": views}
    models = [minddp.DistributedDataParallel(layers(), **options) for _ in range(2)]
    optimizers = [OPTIMIZERS[name](groups(model)) for model in models]
    schedulers = [LambdaLR(optimizer, lambda turn: 0.8**turn) for optimizer in optimizers]
    models[0].overlap_optimizer(optimizers[0])
    for turn in range(6):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * turn + rank))
        for model in models:
            with model.no_sync():
                model(x).square().sum().backward()
            model(x).square().sum().backward()
        optimizers[1].step()
        for scheduler, model in zip(schedulers, models, strict=True):
            scheduler.step()
            model.zero_grad()
        for (param_name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert torch.equal(ours, theirs), f"{param_name} in step {turn}"
    assert len(models[0].plan.buckets) > 1
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for index, state in states[1].items():
        for key, value in state.items():
            ours = torch.as_tensor(states[0][index][key])
            assert torch.equal(ours, torch.as_tensor(value)), f"state {key} of {index}"


def overlapped() -> tuple[nn.Module, torch.optim.Optimizer, OverlappedOptimizer]:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, overlap(optimizer, model)


def overlap(optimizer: torch.optim.Optimizer, model: nn.Module) -> OverlappedOptimizer:
    return OverlappedOptimizer(optimizer, model, list(model.parameters()), [])


def test_the_loop_must_not_step_again() -> None:
    model, optimizer, _ = overlapped()
    before = [param.clone() for param in model.parameters()]
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="has been given to `overlap_optimizer`"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_after_removal_the_optimizer_steps_as_before() -> None:
    model, optimizer, handle = overlapped()
    handle.remove()
    handle.remove()
    model(torch.ones(2, 8)).sum().backward()
    before = [param.clone() for param in model.parameters()]
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_an_optimizer_that_evaluates_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS evaluates the model"):
        overlap(torch.optim.LBFGS((model := layers()).parameters()), model)


class CountsInGroup(torch.optim.SGD):
    """As schedule-free optimizers: a value of the group is part of the state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0]["k"] = 0

    def step(self, closure: None = None) -> None:
        self.param_groups[0]["k"] += 1


class HasAttribute(torch.optim.SGD):
    factor = 1.0

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.detach().sub_(self.factor * param.grad)


def test_an_optimizer_that_keeps_state_in_its_groups_is_refused() -> None:
    model = layers()
    handle = overlap(CountsInGroup(model.parameters()), model)
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(RuntimeError, match=r"changes \['k'\] of a group"):
        handle.after_unpack(SimpleNamespace(params=[model[1].weight]))


def test_an_optimizers_own_attributes_count() -> None:
    """`Optimizer.__getstate__` leaves them out."""
    model = layers()
    optimizer = HasAttribute(model.parameters(), lr=0.1)
    optimizer.factor = 2.0
    model(torch.ones(2, 8)).sum().backward()
    weight = model[1].weight
    expected = weight.detach() - 2.0 * weight.grad
    overlap(optimizer, model).after_unpack(SimpleNamespace(params=[weight]))
    assert torch.equal(weight, expected)


def test_each_bucket_is_stepped_when_it_is_unpacked() -> None:
    model = layers()
    ddp = FakeDDP(model, bucket_cap_mb_list=[0])
    handle = overlapped_in(ddp, torch.optim.SGD(model.parameters(), lr=0.1))
    before = [param.clone() for param in model.parameters()]
    ddp.step(torch.ones(2, 8))
    after = [param.clone() for param in model.parameters()]
    assert not any(map(torch.equal, before, after))
    handle.remove()
    ddp.step(torch.ones(2, 8))
    assert all(map(torch.equal, after, model.parameters()))


# ------------------------------------------------------------------ parameters that no bucket steps


def overlapped_in(ddp: FakeDDP, optimizer: torch.optim.Optimizer) -> OverlappedOptimizer:
    return OverlappedOptimizer(optimizer, ddp.module, ddp.reducer.params, ddp.reducer.modes)


def test_a_parameter_outside_of_the_wrapper_is_refused() -> None:
    """It would never be stepped, and `step` is refused."""
    ddp, head = FakeDDP(layers()), nn.Linear(8, 3)
    optimizer = torch.optim.SGD([{"params": ddp.module.parameters()}, {"params": head.parameters()}], lr=0.1)
    with pytest.raises(ValueError, match=r"a parameter of shape \(3, 8\), .* of shape \(3,\)"):
        overlapped_in(ddp, optimizer)
    optimizer.step()  # is not refused
    assert not [mode for mode in ddp.reducer.modes if isinstance(mode, OverlappedOptimizer)]


def test_frozen_parameters_are_no_harm_until_they_are_trained() -> None:
    model = layers()
    model[0].requires_grad_(False)
    ddp = FakeDDP(model)
    overlapped_in(ddp, torch.optim.SGD(model.parameters(), lr=0.1))
    ddp.step(torch.ones(2, 8))
    model[0].bias.requires_grad_()
    with pytest.raises(ValueError, match=r"`0\.bias`"):
        ddp(torch.ones(2, 8))


def test_a_group_that_is_added_later_is_refused_by_the_next_forward() -> None:
    ddp, head = FakeDDP(layers()), nn.Linear(8, 3)
    optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
    overlapped_in(ddp, optimizer)
    ddp.step(torch.ones(2, 8))
    optimizer.add_param_group({"params": head.weight})
    with pytest.raises(ValueError, match=r"a parameter of shape \(3, 8\)"):
        ddp(torch.ones(2, 8))


@on_ranks(2)
@pytest.mark.parametrize("how", ["ignored", "delayed"])
def test_parameters_that_the_wrapper_leaves_out_of_its_buckets_are_refused(rank: int, how: str) -> None:
    model = layers()
    options: dict[str, Any] = {}
    if how == "ignored":
        minddp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["3.bias"])
    else:
        options["delay_all_reduce_named_params"] = [("3.bias", model[3].bias)]
        options["param_to_hook_all_reduce"] = model[0].weight
    ddp = minddp.DistributedDataParallel(model, **options)
    with pytest.raises(ValueError, match=r"`3\.bias`") as error:
        ddp.overlap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert "2.bias" not in str(error.value)
