"""Train twice in the same ranks, with torch's class and then with minddp installed, and compare the bits.

A framework is imported by the first training, and so refers to torch's class when minddp is installed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten

import minddp
from minddp.compat import install as recognition
from tests.ranks import RankPool


@dataclass(frozen=True)
class Trained:
    """The results of a training run: the class that wrapped the model, the model, and what else must be equal."""

    wrapper: type
    model: nn.Module
    rest: Any = None


def expect_same_bits(pair: RankPool, train: Callable[..., Trained], *args: Any) -> None:
    """Run `train(rank, *args)` with either class on each rank: the bits must be equal.

    The ranks' parameters must be equal too. They saw different data, so this fails if gradients are not averaged.
    """
    first, second = pair.run(_train_with_both, train, *args, timeout_s=240)  # the first imports a framework
    assert first == second


def _train_with_both(rank: int, train: Callable[..., Trained], *args: Any) -> str:
    """On a rank: returns a digest of the parameters."""
    look_launched(rank)
    expected = train(rank, *args)
    with minddp.install():
        actual = train(rank, *args)
    assert expected.wrapper is recognition.TorchDDP
    assert actual.wrapper is minddp.DistributedDataParallel
    assert_same_bits(expected.model.state_dict(), actual.model.state_dict())
    assert_same_bits(expected.rest, actual.rest)
    content = b"".join(param.detach().numpy().tobytes() for param in actual.model.parameters())
    return hashlib.sha256(content).hexdigest()


def assert_same_bits(expected: Any, actual: Any) -> None:
    """Equal structure, equal numbers, and tensors of equal dtype and bits."""
    leaves, structure = tree_flatten(expected)
    other_leaves, other_structure = tree_flatten(actual)
    assert structure == other_structure
    for leaf, other in zip(leaves, other_leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            assert leaf.dtype == other.dtype
            assert torch.equal(leaf, other), (leaf, other)
        else:
            assert leaf == other


def look_launched(rank: int) -> None:
    """The environment that torchrun gives a rank, from which frameworks take rank and world size."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(dist.get_world_size()),
        LOCAL_WORLD_SIZE=str(dist.get_world_size()),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="test",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",  # must not be used: there is a process group already
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
    )


def tiny_model(seed: int = 0) -> nn.Module:
    """Some layers, with buffers; the same on every rank, and each time."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def batches(rank: int, count: int, size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets, other ones on each rank."""
    random = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(size, 6, generator=random), torch.randn(size, 3, generator=random)) for _ in range(count)]
