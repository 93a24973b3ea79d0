"""The same bits on any number of ranks."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from tests.features.beside import random as batch_of
from tests.ranks import RankPool, on_ranks
from tests.tools.elastic.trainings import STEPS, Training, merged, run

Ranks = Callable[[int], RankPool]


def compare(ranks: Ranks, training: Training, world_sizes: tuple[int, ...], transport: str = "auto") -> None:
    expected: dict[str, str] | None = None
    for world_size in world_sizes:
        found = merged(ranks(world_size).run(run, training, transport))
        assert len(found) == STEPS * (training.shares + 2) + 1
        expected = expected or found
        differing = [name for name, value in found.items() if value != expected[name]]
        assert not differing, f"{training} differs on {world_size} ranks: {differing[:3]}"


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 160))]
)
def test_random_trainings_have_the_same_bits_on_1_to_4_ranks(ranks: Ranks, seed: int) -> None:
    compare(ranks, Training.drawn(seed), (1, 2, 3, 4), "process_group" if seed % 2 else "auto")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 206))
def test_the_same_bits_on_up_to_8_ranks(ranks: Ranks, seed: int) -> None:
    training = Training.drawn(seed)
    compare(ranks, training, tuple(n for n in (1, 2, 3, 4, 6, 8) if n <= training.shares))


# ---------------------------------------------------------------------- beside torch


@on_ranks(2)
def test_two_shares_on_two_ranks_have_the_bits_of_torchs_ddp(rank: int) -> None:
    """Without randomness."""
    models = []
    for native in (False, True):
        model = Training(3, ("large", "conv", "tiny", "norm"), shares=2).model()
        ddp: Any = TorchDDP(model) if native else minddp.DistributedDataParallel(model, logical_ranks=2)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        for step in range(STEPS):
            batches = Training(3, shares=2).batches(step)
            for share in [rank] if native else ddp.shares():
                ddp(batches[share]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert all(map(torch.equal, *(model.parameters() for model in models)))


# ---------------------------------------------------------------------- what surrounds a share


def wrapped(**options: Any) -> minddp.DistributedDataParallel:
    torch.manual_seed(0)
    return minddp.DistributedDataParallel(nn.Linear(3, 2), **{"logical_ranks": 4, **options})


def backward(ddp: minddp.DistributedDataParallel) -> None:
    ddp(torch.ones(2, 3)).sum().backward()


def drawn_in_shares(rank: int) -> list[list[float]]:
    """They leave no random state behind."""
    ddp, drawn = wrapped(), []
    before = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    for share in ddp.shares():
        drawn.append([share, torch.rand(()).item(), random.random(), np.random.rand()])
        backward(ddp)
    assert (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()) == before
    return drawn


def test_a_share_has_a_random_state_of_its_own(ranks: Ranks) -> None:
    [alone] = ranks(1).run(drawn_in_shares)
    assert alone == [row for rows in ranks(3).run(drawn_in_shares) for row in rows]
    assert len({row[1] for row in alone}) == 4


def in_each_share(act: Callable[[minddp.DistributedDataParallel], object], *, leaves_early: bool = False) -> None:
    ddp = wrapped()
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for _ in ddp.shares():
        act(ddp)
        if leaves_early:
            break
    optimizer.step()


def backward_twice(ddp: minddp.DistributedDataParallel) -> None:
    loss = ddp(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def backward_without_sync(ddp: minddp.DistributedDataParallel) -> None:
    with ddp.no_sync():
        backward(ddp)


def backward_and_step(ddp: minddp.DistributedDataParallel) -> None:
    backward(ddp)
    torch.optim.SGD(ddp.parameters(), 0.1).step()


MISTAKES: dict[str, Callable[[], object]] = {
    "outside of it": lambda: backward(wrapped()),
    "the second one of its share": lambda: in_each_share(lambda ddp: [backward(ddp), backward(ddp)]),
    "backward once for each share": lambda: in_each_share(lambda ddp: None),
    "or have changed since": lambda: in_each_share(backward_twice),
    "without `no_sync`": lambda: in_each_share(backward_without_sync),
    "before all shares": lambda: in_each_share(backward, leaves_early=True),
    "were computed. Step after the loop": lambda: in_each_share(backward_and_step),
    "pass logical_ranks": lambda: next(iter(wrapped(logical_ranks=None).shares())),
    "`logical_ranks` and `static_graph` exclude each other": lambda: wrapped(static_graph=True),
    "exclude each other": lambda: wrapped().register_comm_hook(None, lambda state, bucket: None),
    "every share counts the same": lambda: wrapped().weigh(2.0),
    "1 or more": lambda: wrapped(logical_ranks=0),
}


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks(lambda world_size: world_size)
def test_mistakes_are_named(rank: int, world_size: int) -> None:
    for text, make in MISTAKES.items():
        with pytest.raises((RuntimeError, ValueError), match=re.escape(text)):
            make()


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks(lambda world_size: world_size)
def test_what_grad_held_before_is_added(rank: int, world_size: int) -> None:
    ddp = wrapped()
    for param in ddp.parameters():
        param.grad = torch.full_like(param, 5.0)
    for _ in ddp.shares():
        backward(ddp)
    weight = ddp.module.weight.grad
    assert torch.equal(weight, torch.full_like(weight, 7.0))  # two rows of ones, in each share


# ---------------------------------------------------------------------- parameters with other strides


@pytest.mark.parametrize("logical_ranks", [None, 4])
@on_ranks(2)
def test_ranks_agree_on_the_layout_when_only_one_takes_other_memory(rank: int, logical_ranks: int | None) -> None:
    """Rank 0 keeps what shares memory with gradients, so its bucket leaves its memory to that.

    In each step gradients are those of a module without a wrapper.
    """
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Conv2d(3, 64, 3, bias=False), nn.Conv2d(64, 48, 3, bias=False))
    ddp = minddp.DistributedDataParallel(copy.deepcopy(alone), logical_ranks=logical_ranks)
    kept: list[torch.Tensor] = []
    places: set[int] = set()
    for step in range(5):
        if step == 3:  # the buckets have been rebuilt
            ddp.to(memory_format=torch.channels_last)
        ddp.zero_grad()
        alone.zero_grad()
        batches = [batch_of(1, 3, 8, 8, rank=share, step=step) for share in range(logical_ranks or 2)]
        for share in ddp.shares() if logical_ranks else [rank]:
            ddp(batches[share]).square().mean().backward()
        torch.stack([alone(batch).square().mean() for batch in batches]).mean().backward()
        for ours, own in zip(ddp.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(ours.grad, own.grad, rtol=1e-3, atol=1e-6)
        if rank == 0 and step == 2:
            kept += [param.grad.detach() for param in ddp.parameters()]
        if step >= 2:
            places.add(ddp._reducer.store.all()[0].flat.data_ptr())
    assert (len(places) > 1) == (rank == 0)
