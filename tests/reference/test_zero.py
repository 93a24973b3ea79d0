"""The rungs below and above DDP: the weights of one process, what each rank holds, and what it sends."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference import oracle
from reference.data_parallel import DataParallelInOneProcess
from reference.ladder import RUNGS, rungs
from reference.sharding import Held, Training, held
from tests.ranks import of_all_ranks, on_ranks
from tests.reference.cases import CASES, HalfUsed, build, loss_of, shards_for

ADAM = partial(torch.optim.Adam, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SHARDED = ["zero1", "zero2", "zero3"]
EVERY = [*rungs(0), *SHARDED]
STEPS = 3
ROUNDING = 1e-13


def weights_of_one_process(case: str, world_size: int, steps: int = STEPS) -> dict[str, Tensor]:
    """Trained by the oracle's gradients."""
    module = build(case, seed=0)
    optimizer = optimizer_for(case)(module.parameters())
    for step in range(steps):
        grads = oracle.mean_over_ranks(module, shards_for(world_size, seed=step), loss_of)
        for name, param in module.named_parameters():
            param.grad = grads.get(name)
        optimizer.step()
    return {name: param.detach() for name, param in module.named_parameters() if param.requires_grad}


def optimizer_for(case: str) -> Callable[..., torch.optim.Optimizer]:
    """The bias before a batch norm has a gradient of nothing but rounding, and Adam divides by its size."""
    return SGD if case == "batch_norm" else ADAM


def train(training: Training, rank: int, steps: int = STEPS) -> dict[str, Tensor]:
    for step in range(steps):
        loss_of(training, shards_for(dist.get_world_size(), seed=step)[rank]).backward()
        training.step()
    return {name: weight.clone() for name, weight in training.weights().items()}


def trained(rank: int, name: str, case: str) -> dict[str, Tensor]:
    return train(RUNGS[name](build(case, seed=rank), optimizer_for(case)), rank)


@on_ranks(lambda world_size, **_: world_size)
@pytest.mark.parametrize("case", sorted(CASES.keys() - {"two_dtypes"}))
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", EVERY)
def test_weights_are_those_of_one_process(rank, name, world_size, case):
    weights = trained(rank, name, case)
    assert oracle.largest_difference(weights, weights_of_one_process(case, world_size)) < ROUNDING
    assert all(torch.equal(weights[key], other[key]) for other in of_all_ranks(weights) for key in weights)


@on_ranks(2)
@pytest.mark.parametrize("name", SHARDED)
def test_two_dtypes(rank, name):
    weights = trained(rank, name, "two_dtypes")
    assert oracle.largest_difference(weights, weights_of_one_process("two_dtypes", 2)) < 1e-6


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"two_dtypes", "batch_norm"}))
def test_data_parallel_in_one_process_trains_as_the_ranks_do(case):
    training = DataParallelInOneProcess(build(case, seed=0), ADAM, devices=["cpu"] * 3)
    for step in range(STEPS):
        loss_of(training, torch.cat(shards_for(3, seed=step))).backward()
        training.step()
    assert oracle.largest_difference(training.weights(), weights_of_one_process(case, 3)) < ROUNDING


def test_data_parallel_normalises_each_part_and_keeps_the_first_replicas_buffers():
    shards = shards_for(2)
    training = DataParallelInOneProcess(build("batch_norm", seed=0), ADAM, devices=["cpu"] * 2)
    alone = build("batch_norm", seed=0)
    loss_of(training, torch.cat(shards)).backward()
    alone(shards[0])
    assert torch.equal(training.module[1].running_mean, alone[1].running_mean)
    expected = oracle.mean_over_ranks(build("batch_norm", seed=0), shards, loss_of)
    actual = {name: param.grad for name, param in training.module.named_parameters()}
    assert oracle.largest_difference(actual, expected) < ROUNDING


def test_data_parallel_sends_weights_and_gradients_in_every_step():
    module = build("plain", seed=0)
    nbytes = sum(param.nbytes for param in module.parameters())
    training = DataParallelInOneProcess(module, ADAM, devices=["cpu"] * 3)
    loss = loss_of(training, torch.cat(shards_for(3)))
    assert sum(message.sent_nbytes for message in training.wire.sent) == 2 * nbytes
    loss.backward()
    assert sum(message.sent_nbytes for message in training.wire.sent) == 4 * nbytes
    enabled: list[bool] = []
    training.module.register_forward_hook(lambda *_: enabled.append(torch.is_grad_enabled()))
    with torch.no_grad():
        assert not training(shards_for(3)[0]).requires_grad
    assert enabled == [False] * 2  # in each replica's thread: 4 examples make 2 parts for 3 devices


# --- what is held and sent ---


def counted(name: str) -> tuple[Held, int]:
    training = RUNGS[name](eight_by_eight(), ADAM)
    seen: list[Held] = []
    training.optimizer.register_step_pre_hook(lambda *_: seen.append(held(training.module, training.optimizer)))
    for _ in range(2):
        before = len(training.wire.sent)
        training(torch.randn(3, 8)).sum().backward()
        training.step()
    return seen[-1], sum(message.sent_nbytes for message in training.wire.sent[before:])


def eight_by_eight() -> nn.Module:
    """4 layers of 72 floats, so that all cuts by 2 and 3 are even."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


B = 4 * 4 * 72
STEP_COUNT = 4  # Adam keeps one of 4 bytes for each tensor that it is given


@on_ranks(lambda world_size, **_: world_size)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("name", "parameters", "gradients", "optimizer", "rounds"),
    [
        ("bucketed", B, B, 2 * B + 8 * STEP_COUNT, 2),
        ("zero1", B, B, "2B/n", 3),
        ("zero2", B, "B/n", "2B/n", 2),
        ("zero3", "B/n", "B/n", "2B/n", 3),
    ],
)
def test_what_is_held_and_sent(rank, world_size, name, parameters, gradients, optimizer, rounds):
    pieces = {"zero1": 1, "zero2": 1, "zero3": 4}.get(name, 0)  # one bucket, or four layers
    shares = {"B/n": B // world_size, "2B/n": 2 * B // world_size + pieces * STEP_COUNT}
    expected = Held(*(shares.get(part, part) for part in (parameters, gradients, optimizer)))
    assert counted(name) == (expected, rounds * (world_size - 1) * B // world_size)


# --- accumulation and errors ---


@on_ranks(2)
@pytest.mark.parametrize("synchronize_each", [True, False])
@pytest.mark.parametrize("name", SHARDED)
def test_micro_batches_add_up(rank: int, name: str, synchronize_each: bool) -> None:
    module = build("plain", seed=0)
    grads = [oracle.mean_over_ranks(module, shards_for(2, seed=seed), loss_of) for seed in (0, 1)]
    expected = {n: p.detach() - grads[0][n] - grads[1][n] for n, p in module.named_parameters()}
    training = RUNGS[name](build("plain", seed=0), partial(torch.optim.SGD, lr=1.0))
    first, second = (shards_for(2, seed=seed)[rank] for seed in (0, 1))
    if synchronize_each:
        loss_of(training, first).backward()
        training.synchronize()
    else:
        with training.no_sync():
            loss_of(training, first).backward()
            assert not [m for m in training.wire.sent if "bucket" in m.label or "gradients" in m.label]
    loss_of(training, second).backward()
    training.step()
    assert oracle.largest_difference(training.weights(), expected) < ROUNDING


@on_ranks(2)
@pytest.mark.parametrize("name", SHARDED)
def test_an_unused_parameter_is_an_error_that_names_it(rank: int, name: str) -> None:
    training = RUNGS[name](HalfUsed(), ADAM)
    with pytest.raises(RuntimeError, match=rf"No gradient for `unused\.weight`, `unused\.bias` on rank {rank}\."):
        training(torch.randn(3, 6)).sum().backward()
        training.step()


@on_ranks(2)
def test_zero3_holds_one_layer_at_a_time(rank: int) -> None:
    """Bytes of the first layer's weight: at rest, in its forward, in the second's, after a forward that raises."""
    training = RUNGS["zero3"](eight_by_eight(), ADAM)
    weight, seen = training.module[0].weight, []

    def look(*_: object) -> None:
        seen.append(weight.untyped_storage().nbytes())

    look()
    handles = [training.module[number].register_forward_hook(look, prepend=True) for number in (0, 1)]
    training(torch.randn(3, 8)).sum().backward()
    training.step()
    for handle in handles:
        handle.remove()
    look()
    before = copy.deepcopy(training.weights())
    training(torch.randn(3, 8)).sum().backward()
    try:
        training(torch.randn(3, 7))
    except RuntimeError:
        look()
    training.step()  # what is still there must not be taken for the new weights
    look()
    assert all(not torch.equal(weight, before[name]) for name, weight in training.weights().items())
    assert seen == [0, 288, 0, 0, 288, 0]
