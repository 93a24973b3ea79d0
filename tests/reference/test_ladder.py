"""Every rung, in real processes, against the oracle."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference import oracle
from reference.interface import DataParallel, gradient
from reference.ladder import rungs
from tests.ranks import on_ranks
from tests.reference.cases import CASES, HalfUsed, build, loss_of, shards_for

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


@on_ranks(lambda world_size, **_: world_size)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_oracles(rank: int, name: str, world_size: int, case: str) -> None:
    """But for rounding; ranks start from different weights."""
    shards = shards_for(dist.get_world_size())
    expected = oracle.mean_over_ranks(build(case, seed=0), shards, loss_of)
    ddp = wrap(name, build(case, seed=rank))
    loss_of(ddp, shards[rank]).backward()
    ddp.synchronize()
    dtype = torch.float32 if case == "two_dtypes" else torch.float64
    allowed = tolerance(len(shards), expected, torch.finfo(dtype).eps)
    assert oracle.largest_difference(gradients_of(ddp), expected) <= allowed


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "messages", "launched_in_backward"),
    [("naive", 6, 0), ("flat", 1, 0), ("overlapped", 6, 6), ("bucketed", 2, 2), ("automatic", 2, 2)],
)
def test_messages_and_bytes(rank: int, name: str, messages: int, launched_in_backward: int) -> None:
    ddp = wrap(name, build("plain", seed=rank))
    loss_of(ddp, shards_for(dist.get_world_size())[rank]).backward()
    assert len(ddp.wire.sent) == launched_in_backward
    ddp.synchronize()
    assert len(ddp.wire.sent) == messages
    elements = sum(param.numel() for param in ddp.module.parameters())
    assert sum(message.nbytes for message in ddp.wire.sent) == 8 * elements


@on_ranks(2)
@pytest.mark.parametrize("name", NAMES)
def test_no_sync_ends_with_its_block_even_by_an_exception(rank: int, name: str) -> None:
    ddp = wrap(name, nn.Linear(6, 2))
    with suppress(KeyError), ddp.no_sync():
        assert not ddp.synchronizing
        raise KeyError
    assert ddp.synchronizing


@on_ranks(2)
@pytest.mark.parametrize("name", NAMES)
def test_an_unused_parameter_is_an_error_that_names_it_and_its_rank(rank: int, name: str) -> None:
    ddp = wrap(name, HalfUsed())
    with pytest.raises(RuntimeError, match=rf"No gradient for `unused\.weight`, `unused\.bias` on rank {rank}\."):
        ddp(torch.randn(3, 6)).sum().backward()
        ddp.synchronize()


@on_ranks(2)
@pytest.mark.parametrize("name", ["bucketed", "overlapped", "automatic"])
def test_a_second_backward_before_synchronize_is_an_error(rank: int, name: str) -> None:
    """But for `automatic`, which needs no call between the two."""
    ddp = wrap(name, nn.Linear(6, 2))
    ddp(torch.randn(3, 6)).sum().backward()
    error = pytest.raises(RuntimeError, match=rf"^A second gradient for `.* on rank {rank} before synchronize\(\)")
    with nullcontext() if name == "automatic" else error:
        ddp(torch.randn(3, 6)).sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_train_is_an_error(rank: int, name: str) -> None:
    with pytest.raises(ValueError, match=r"^Linear has no parameter that requires a gradient"):
        wrap(name, nn.Linear(6, 2).requires_grad_(False))
