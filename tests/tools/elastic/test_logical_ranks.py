"""The same bits on any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from tests.features.beside import random
from tests.ranks import RankPool
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


@pytest.mark.parametrize("seed", range(8))
def test_random_trainings_have_the_same_bits_on_1_to_4_ranks(ranks: Ranks, seed: int) -> None:
    compare(ranks, Training.drawn(seed), (1, 2, 3, 4), "process_group" if seed % 2 else "auto")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_more_random_trainings(ranks: Ranks, seed: int) -> None:
    compare(ranks, Training.drawn(seed), (1, 2, 3, 4), "process_group" if seed % 2 else "auto")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 206))
def test_the_same_bits_on_up_to_8_ranks(ranks: Ranks, seed: int) -> None:
    training = Training.drawn(seed)
    compare(ranks, training, tuple(n for n in (1, 2, 3, 4, 6, 8) if n <= training.shares))


# ---------------------------------------------------------------------- beside torch


def train_two_shares(rank: int, native: bool) -> list[torch.Tensor]:
    """Two shares on two ranks, without randomness: what torch's DDP computes, too."""
    model = Training(3, ("large", "conv", "tiny", "norm"), shares=2).model()
    ddp: nn.Module = TorchDDP(model) if native else minddp.DistributedDataParallel(model, logical_ranks=2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(STEPS):
        batches = Training(3, shares=2).batches(step)
        for share in [rank] if native else ddp.shares():
            ddp(batches[share]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def test_two_shares_on_two_ranks_have_the_bits_of_torchs_ddp(ranks: Ranks) -> None:
    ours, theirs = ranks(2).run(train_two_shares, False), ranks(2).run(train_two_shares, True)
    for one, other in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(one, other)


# ---------------------------------------------------------------------- what surrounds a share


def wrapped(**options: Any) -> minddp.DistributedDataParallel:
    torch.manual_seed(0)
    return minddp.DistributedDataParallel(nn.Linear(3, 2), **{"logical_ranks": 4, **options})


def backward(ddp: minddp.DistributedDataParallel) -> None:
    ddp(torch.ones(2, 3)).sum().backward()


def random_states(rank: int) -> tuple[list[list[float]], bool]:
    import random

    import numpy as np

    ddp, drawn = wrapped(), []
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for share in ddp.shares():
        drawn.append([share, torch.rand(()).item(), random.random(), np.random.rand()])
        backward(ddp)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    return drawn, torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_a_share_has_a_random_state_of_its_own_and_leaves_none_behind(ranks: Ranks) -> None:
    (alone, is_kept), *_ = ranks(1).run(random_states)
    dealt = ranks(3).run(random_states)
    assert alone == [row for rows, _ in dealt for row in rows]
    assert len({row[1] for row in alone}) == 4
    assert is_kept
    assert all(kept for _, kept in dealt)


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


def mistakes(_rank: int) -> dict[str, str]:
    said = {}
    for text, make in MISTAKES.items():
        try:
            make()
        except (RuntimeError, ValueError) as error:
            said[text] = str(error)
    return said


@pytest.mark.parametrize("world_size", [1, 2])
def test_mistakes_are_named(ranks: Ranks, world_size: int) -> None:
    for said in ranks(world_size).run(mistakes):
        assert said.keys() == MISTAKES.keys()
        for text, message in said.items():
            assert text in message


def five_ranks(_rank: int) -> str:
    with pytest.raises(ValueError, match="2 logical ranks cannot be dealt to 3 ranks") as error:
        wrapped(logical_ranks=2)
    return str(error.value)


def test_more_ranks_than_shares_are_refused(ranks: Ranks) -> None:
    assert len(set(ranks(3).run(five_ranks))) == 1


def keeps_earlier_gradients(_rank: int) -> bool:
    ddp = wrapped(find_unused_parameters=False)
    for param in ddp.parameters():
        param.grad = torch.full_like(param, 5.0)
    for _ in ddp.shares():
        backward(ddp)
    weight = ddp.module.weight.grad
    return torch.equal(weight, torch.full_like(weight, 7.0))  # two rows of ones, in each share


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_grad_held_before_is_added(ranks: Ranks, world_size: int) -> None:
    assert all(ranks(world_size).run(keeps_earlier_gradients))


# ---------------------------------------------------------------------- parameters with other strides


def turns_channels_last(rank: int, logical_ranks: int | None, holder: int) -> tuple[list[bool], bool]:
    """Rank `holder` keeps what shares memory with gradients, so its bucket leaves its memory to that.

    Returns, for each step, True if gradients are those of a module without a wrapper; and True if rank 1's bucket
    has other memory in the end.
    """
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Conv2d(3, 64, 3, bias=False), nn.Conv2d(64, 48, 3, bias=False))
    ddp = minddp.DistributedDataParallel(copy.deepcopy(alone), logical_ranks=logical_ranks)
    are_right: list[bool] = []
    kept: list[torch.Tensor] = []
    places: set[int] = set()
    for step in range(5):
        if step == 3:  # the buckets have been rebuilt
            ddp.to(memory_format=torch.channels_last)
        ddp.zero_grad()
        alone.zero_grad()
        batches = [random(1, 3, 8, 8, rank=share, step=step) for share in range(logical_ranks or 2)]
        for share in ddp.shares() if logical_ranks else [rank]:
            ddp(batches[share]).square().mean().backward()
        torch.stack([alone(batch).square().mean() for batch in batches]).mean().backward()
        are_right.append(all(map(_are_close, ddp.parameters(), alone.parameters())))
        if rank == holder and step == 2:
            kept += [param.grad.detach() for param in ddp.parameters()]
        if step >= 2:
            places.add(ddp._reducer.store.all()[0].flat.data_ptr())
    return are_right, len(places) > 1


def _are_close(param: nn.Parameter, other: nn.Parameter) -> bool:
    return torch.allclose(param.grad, other.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("logical_ranks", [None, 4])
def test_ranks_agree_on_the_layout_when_only_one_takes_other_memory(
    ranks: Ranks, logical_ranks: int | None
) -> None:
    found = ranks(2).run(turns_channels_last, logical_ranks, 0)
    assert [took_other_memory for _, took_other_memory in found] == [True, False]
    assert all(all(are_right) for are_right, _ in found)
