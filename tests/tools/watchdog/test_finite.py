"""`check_finite`: each trouble on real ranks, with its error on all of them, and what it leaves alone."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

import minddp
from minddp.tools.watchdog.check import EVERY, FIRST
from minddp.tools.watchdog.fingerprint import SMALL_BYTES
from minddp.tools.watchdog.finite import NotFiniteCheck
from tests.fakes import FakeDDP, FakeTransport
from tests.modules import Scales
from tests.ranks import of_all_ranks, on_ranks

STEPS, BAD_STEP = 4, 2


class Net(nn.Module):
    """A dense layer, a sparse and a complex parameter, and one that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=True)
        self.waves = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.large = nn.Linear(4, 5000)  # a pack group by itself
        self.extra = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, extra: bool = True) -> torch.Tensor:
        y = x + self.words(torch.arange(len(x))) + (self.waves * x).abs()
        return self.large(self.extra(y) if extra else y).mean()


def train(rank: int, bad: dict[int, tuple[str, float]], options: dict[str, Any], hook: bool = False) -> Any:
    """Four steps, in the third of which gradients are made bad by rank; errors, and the weights at the end."""
    torch.manual_seed(0)
    net = Net()
    ddp = minddp.DistributedDataParallel(net, **options)
    if hook:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    name, value = bad.get(rank, ("", 0.0))
    is_bad = False

    def spoil(param: nn.Parameter) -> None:
        if is_bad:
            grad = param.grad._values() if param.grad.is_sparse else param.grad
            grad.view(-1)[-1] = value

    if name:
        dict(net.named_parameters())[name].register_post_accumulate_grad_hook(spoil)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    errors = []
    for step in range(STEPS):
        is_bad = step == BAD_STEP
        leaves_out = options.get("find_unused_parameters", False) and rank == 0
        generator = torch.Generator().manual_seed(10 * step + rank)
        try:
            if bad or not is_bad:
                ddp(torch.randn(3, 4, generator=generator), extra=not leaves_out).backward()
                optimizer.step()
        except FloatingPointError as error:
            errors.append(str(error))
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return errors, [param.detach().clone() for param in net.parameters()]


NAN, INF = math.nan, math.inf
CASES: dict[str, tuple[dict[int, tuple[str, float]], dict[str, Any]]] = {
    "default": ({1: ("extra.weight", NAN)}, {}),
    "large": ({1: ("large.weight", INF)}, {}),
    "views": ({1: ("large.weight", NAN)}, {"gradient_as_bucket_view": True}),
    "batched": ({2: ("large.bias", -INF)}, {"batched_grad_copy": True}),
    "sparse": ({2: ("words.weight", INF)}, {}),
    "complex": ({0: ("waves", NAN)}, {}),
    "unused": ({1: ("extra.bias", NAN)}, {"find_unused_parameters": True}),
    "static": ({1: ("extra.bias", NAN)}, {"static_graph": True}),
    "by the process group": ({1: ("extra.bias", NAN)}, {"transport": "process_group"}),
    "small buckets": ({1: ("extra.weight", INF), 2: ("large.weight", NAN)}, {"bucket_cap_mb": 0.0001}),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(3)
def test_every_rank_names_the_gradient_and_goes_on_with_equal_bits(rank: int, case: str) -> None:
    """The weights are those of a run without that step and the test."""
    bad, options = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (error,), weights = train(rank, bad, {**options, "check_finite": True}, hook=case == "small buckets")
        _, without = train(rank, {}, {**options, "check_finite": False}, hook=case == "small buckets")
    assert all(map(torch.equal, weights, without))
    assert all(weight.isfinite().all() for weight in weights)
    assert of_all_ranks(error) == [error] * 3
    assert error.startswith(f"In backward {BAD_STEP + 1}, before averaging, ")
    for offender, (name, value) in bad.items():
        assert f"rank {offender}'s gradient of `{name}` (bucket " in error
        assert f"has {'NaN' if math.isnan(value) else 'infinity'}" in error
    assert error.count("'s gradient of") == len(bad)


def error_of(ddp: nn.Module, value: float) -> str:
    """That of a step on inputs of this `value`, if there is one."""
    try:
        ddp(torch.full((1, 2), value)).sum().backward()
    except FloatingPointError as error:
        return str(error)
    finally:
        ddp.zero_grad()
    return ""


def checked(**options: Any) -> minddp.DistributedDataParallel:
    return minddp.DistributedDataParallel(nn.Linear(2, 2), check_finite=True, **options)


@on_ranks(2)
def test_a_rank_of_weight_0_is_not_tested(rank: int) -> None:
    ddp, value = checked(), NAN if rank == 1 else 1.0
    ddp.weigh(1.0 - rank)
    assert error_of(ddp, value) == ""
    ddp.weigh(1.0)
    assert "In backward 2, before averaging, rank 1's" in error_of(ddp, value)


@on_ranks(2)
def test_a_rank_that_has_joined_raises_too(rank: int) -> None:
    ddp = checked()
    with (
        pytest.raises(FloatingPointError, match=r"rank 1's gradient of `weight` \(bucket 0\) has NaN\. "),
        ddp.join(),
    ):
        for step in range(2 + 2 * rank):
            ddp(torch.full((1, 2), NAN if step == 3 else 1.0)).sum().backward()
            ddp.zero_grad()


@on_ranks(2)
def test_low_precision(rank: int) -> None:
    ddp = checked(mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    assert "rank 1's gradient of `weight` (bucket 0) has NaN. " in error_of(ddp, NAN if rank == 1 else 1.0)


@on_ranks(2)
def test_what_is_accumulated_is_tested_when_it_is_reduced(rank: int) -> None:
    ddp = checked()
    with ddp.no_sync():
        ddp(torch.full((1, 2), NAN)).sum().backward()
    text = error_of(ddp, 1.0)
    assert "rank 0's gradient of `weight` (bucket 0) has NaN and rank 1's gradient of `weight`" in text


@on_ranks(2)
def test_what_it_excludes(rank: int) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    named = [("1.bias", net[1].bias)]
    delayed = {"delay_all_reduce_named_params": named, "param_to_hook_all_reduce": net[0].weight}
    with pytest.raises(ValueError, match="`delay_all_reduce_named_params` and `check_finite` exclude each other"):
        minddp.DistributedDataParallel(net, **delayed, check_finite=True)
    with pytest.raises(RuntimeError, match="`check_finite` is True on rank 0, but not given on rank 1"):
        minddp.DistributedDataParallel(net, check_finite=rank == 0)
    with pytest.raises(ValueError, match="overlap_optimizer"):
        checked().overlap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))


# ------------------------------------------------------------------ without ranks


def test_a_rank_alone_raises() -> None:
    ddp = FakeDDP(nn.Linear(3, 1, bias=False), FakeTransport(world_size=1), check_finite=True)
    with pytest.raises(
        FloatingPointError, match=r"backward 1, before averaging, rank 0's gradient of `weight`.* inf"
    ):
        ddp.step(torch.tensor([[1.0, 1.0, INF]]))
    ddp.module.zero_grad()
    ddp.step(torch.ones(1, 3))


@pytest.mark.parametrize("width", [2, SMALL_BYTES])
@pytest.mark.parametrize("bad_step", [2, EVERY])
def test_the_guard_sees_nan_in_its_sampled_steps(bad_step: int, width: int) -> None:
    """In the first ones as the gradient arrives, later in the average."""
    layer = nn.Linear(width, 1, bias=False)
    check, optimizer = NotFiniteCheck([("weight", layer.weight)]), torch.optim.SGD(layer.parameters(), lr=0.0)
    for step in range(EVERY + 1):
        optimizer.zero_grad()
        check.before_module(step, (), {})
        check.first_gradient(step)
        layer(torch.full((1, width), NAN if step == bad_step else 1.0)).sum().backward()
        if step < FIRST:
            layer.weight.grad.fill_(1.0)  # the average of gradients that differ
        check.post_backward()
        check.before_step(optimizer)
    noted = dict(check.take_notes())
    assert [step for step, names in noted.items() if names] == [bad_step]
    assert noted.keys() > {0, 1, EVERY}
    assert layer.weight._backward_hooks is None  # torch calls an empty dictionary, too


def test_a_parameter_may_be_frozen_meanwhile() -> None:
    layer = nn.Linear(2, 1)
    check = NotFiniteCheck([*layer.named_parameters()])
    layer.bias.requires_grad_(False)
    for step in range(2):
        check.before_module(step, (), {})
        layer(torch.ones(1, 2)).sum().backward()
        check.post_backward()
    assert layer.weight._backward_hooks is None


def test_the_guard_leaves_hooks_of_the_script() -> None:
    weight, seen = nn.Parameter(torch.ones(2)), []
    weight.register_hook(seen.append)
    check = NotFiniteCheck([("weight", weight)])
    check.before_module(0, (), {})
    check.post_backward()
    weight.sum().backward()
    assert len(seen) == 1


def test_a_sum_that_overflows_is_no_error() -> None:
    ddp = FakeDDP(nn.Linear(2, 2, bias=False), check_finite=True)
    ddp.step(torch.full((1, 2), 3e38))
    assert ddp.module.weight.grad.isfinite().all()


def test_what_an_interrupted_backward_has_found_is_forgotten() -> None:
    ddp = FakeDDP(Scales([0, 1], explode_after=0), bucket_cap_mb_list=[0.000001], check_finite=True)
    ddp.module.explosive.arm()
    with pytest.raises(KeyError):
        ddp.step(torch.tensor([NAN]))
    assert len(ddp.reducer.current.reductions) == 1
    ddp.module.explosive.arm(False)
    ddp.module.zero_grad()
    ddp.reducer.ensure_finished()
    ddp.reducer.adopt(ddp.reducer.store.plan)  # the old buckets keep their contents
    ddp.step(torch.ones(1))
