"""torch.distributed.checkpoint: keys without `module.`, and states that go out, to disk, and back in."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.functional import mse_loss

import minddp
from tests.compat.both import Trained, batches, expect_same_bits, look_launched, tiny_model


def wrapped(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    ddp = torch.nn.parallel.DistributedDataParallel(tiny_model(seed))
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=0.01)


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, data: list) -> None:
    for inputs, targets in data:
        optimizer.zero_grad()
        mse_loss(ddp(inputs), targets).backward()
        optimizer.step()


def save_and_resume(rank: int, folder: str) -> Trained:
    """Train, save, load into a model that was initialised otherwise, and train on."""
    ddp, optimizer = wrapped(seed=0)
    data = batches(rank, 6)
    train(ddp, optimizer, data[:3])
    state = {"model": get_model_state_dict(ddp), "optimizer": get_optimizer_state_dict(ddp, optimizer)}
    assert not any("module." in key for part in ("model", "optimizer") for key in part_keys(state[part]))
    checkpoint = Path(folder, type(ddp).__module__)
    dcp.save(state, checkpoint_id=checkpoint)

    resumed, resumed_optimizer = wrapped(seed=1)
    loaded = {
        "model": get_model_state_dict(resumed),
        "optimizer": get_optimizer_state_dict(resumed, resumed_optimizer),
    }
    dcp.load(loaded, checkpoint_id=checkpoint)
    set_model_state_dict(resumed, loaded["model"])
    set_optimizer_state_dict(resumed, resumed_optimizer, loaded["optimizer"])
    train(resumed, resumed_optimizer, data[3:])
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = [
        get_model_state_dict(resumed),
        get_model_state_dict(resumed, options=full),
        get_optimizer_state_dict(resumed, resumed_optimizer),
    ]
    return Trained(type(resumed), resumed.module, states)


def part_keys(state: dict) -> list[str]:
    return [*state, *state.get("state", ())]


def test_checkpoints_have_the_same_keys_and_bits_and_resume_alike(pair, tmp_path: Path) -> None:
    expect_same_bits(pair, save_and_resume, str(tmp_path))


def stripped_keys(rank: int) -> set[str]:
    """With registration alone, and minddp's class used by name."""
    look_launched(rank)
    minddp.register()
    return set(get_model_state_dict(minddp.DistributedDataParallel(tiny_model())))


def test_registration_is_what_strips_the_prefix(pair) -> None:
    assert pair.run(stripped_keys) == [set(tiny_model().state_dict())] * 2
