"""Every rung, in real processes, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference import oracle
from reference.interface import DataParallel, gradient
from reference.ladder import rungs
from tests.reference.cases import CASES, build, loss_of, shards_for

CAP_BYTES = 200  # a few buckets for the small modules here
NAMES = sorted(rungs(CAP_BYTES))


def wrap(name: str, module: nn.Module) -> DataParallel:
    return rungs(CAP_BYTES)[name](module)


def gradients_of(ddp: DataParallel) -> dict[str, Tensor]:
    return {name: gradient(param) for name, param in ddp.trainable.items()}


def tolerance(world_size: int, expected: oracle.Gradients, eps: float) -> float:
    """None on two ranks, where addition commutes; else one rounding for each summand."""
    largest = max(float(grad.abs().max()) for grad in expected.values())
    return 0.0 if world_size == 2 else world_size * eps * largest


# --- bodies of ranks ---


def excess_over_oracle(rank: int, name: str, case: str) -> float:
    """How much further from the oracle than rounding explains; ranks start from different weights."""
    shards = shards_for(dist.get_world_size())
    expected = oracle.mean_over_ranks(build(case, seed=0), shards, loss_of)
    ddp = wrap(name, build(case, seed=rank))
    loss_of(ddp, shards[rank]).backward()
    ddp.synchronize()
    dtype = torch.float32 if case == "two_dtypes" else torch.float64
    allowed = tolerance(len(shards), expected, torch.finfo(dtype).eps)
    return oracle.largest_difference(gradients_of(ddp), expected) - allowed


def train(rank: int, name: str, case: str, steps: int) -> dict[str, Any]:
    ddp = wrap(name, build(case, seed=rank))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        shards = shards_for(dist.get_world_size(), seed=step)
        optimizer.zero_grad()
        loss_of(ddp, shards[rank]).backward()
        ddp.synchronize()
        optimizer.step()
    return dict(ddp.module.state_dict())


def messages_of_a_step(rank: int, name: str) -> tuple[int, int, int]:
    """How many, how many of them in backward, and their bytes."""
    ddp = wrap(name, build("plain", seed=rank))
    loss_of(ddp, shards_for(dist.get_world_size())[rank]).backward()
    in_backward = len(ddp.wire.sent)
    ddp.synchronize()
    return len(ddp.wire.sent), in_backward, sum(message.nbytes for message in ddp.wire.sent)


class SecondHalfUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def error_of_unused(rank: int, name: str) -> str:
    ddp = wrap(name, SecondHalfUnused())
    try:
        ddp(torch.randn(3, 6)).sum().backward()
        ddp.synchronize()
    except RuntimeError as error:
        return str(error)
    return "no error"


def error_of_second_backward(rank: int, name: str) -> str:
    ddp = wrap(name, nn.Linear(6, 2))
    ddp(torch.randn(3, 6)).sum().backward()
    try:
        ddp(torch.randn(3, 6)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def error_without_trainable_parameters(rank: int, name: str) -> str:
    try:
        wrap(name, nn.Linear(6, 2).requires_grad_(False))
    except ValueError as error:
        return str(error)
    return "no error"


def no_sync_restores_after_an_exception(rank: int, name: str) -> tuple[bool, bool]:
    ddp = wrap(name, nn.Linear(6, 2))
    inside = True
    try:
        with ddp.no_sync():
            inside = ddp.synchronizing
            raise KeyError
    except KeyError:
        return inside, ddp.synchronizing


# --- tests ---


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_oracles(ranks, name, world_size, case):
    assert max(ranks(world_size).run(excess_over_oracle, name, case)) <= 0


@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_one_process(ranks, name):
    module = build("tied", seed=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        grads = oracle.mean_over_ranks(module, shards_for(2, seed=step), loss_of)
        for param_name, param in module.named_parameters():
            param.grad = grads[param_name]
        optimizer.step()
    for state in ranks(2).run(train, name, "tied", 4):
        assert all(torch.equal(state[key], value) for key, value in module.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_replicas_stay_equal_to_the_bit(ranks, name):
    first, *others = ranks(3).run(train, name, "plain", 3)
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)


@pytest.mark.parametrize(
    ("name", "messages", "launched_in_backward"),
    [("naive", 6, 0), ("flat", 1, 0), ("overlapped", 6, 6), ("bucketed", 2, 2), ("automatic", 2, 2)],
)
def test_messages_and_bytes(ranks, name, messages, launched_in_backward):
    elements = sum(param.numel() for param in build("plain", seed=0).parameters())
    for counted in ranks(2).run(messages_of_a_step, name):
        assert counted == (messages, launched_in_backward, 8 * elements)


@pytest.mark.parametrize("name", NAMES)
def test_no_sync_ends_with_its_block_even_by_an_exception(ranks, name):
    assert ranks(2).run(no_sync_restores_after_an_exception, name) == [(False, True)] * 2


@pytest.mark.parametrize("name", NAMES)
def test_an_unused_parameter_is_an_error_that_names_it_and_its_rank(ranks, name):
    for rank, message in enumerate(ranks(2).run(error_of_unused, name)):
        assert f"No gradient for `unused.weight`, `unused.bias` on rank {rank}." in message


@pytest.mark.parametrize("name", ["bucketed", "overlapped"])
def test_a_second_backward_before_synchronize_is_an_error(ranks, name):
    for rank, message in enumerate(ranks(2).run(error_of_second_backward, name)):
        assert message.startswith("A second gradient for `")
        assert f"on rank {rank} before synchronize()" in message


def test_automatic_needs_no_call_between_two_backwards(ranks):
    assert ranks(2).run(error_of_second_backward, "automatic") == ["no error"] * 2


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_train_is_an_error(ranks, name):
    for message in ranks(2).run(error_without_trainable_parameters, name):
        assert message.startswith("Linear has no parameter that requires a gradient")
