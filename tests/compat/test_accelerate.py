"""Hugging Face Accelerate: what it uses of the class in which `Accelerator.prepare` wraps a model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from tests.compat.both import Trained, batches, expect_same_bits, tiny_model

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs Accelerate: pip install accelerate")


def prepared(rank: int, **options: Any) -> tuple[Any, nn.Module, Any]:
    """An Accelerator on the CPU, a model that it has wrapped, and an optimizer."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, **options)
    assert accelerator.num_processes == 2
    model = tiny_model()
    ddp, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    assert accelerator.unwrap_model(ddp) is model
    return accelerator, ddp, optimizer


def outcome(accelerator: Any, ddp: nn.Module, optimizer: Any) -> Trained:
    return Trained(type(ddp), accelerator.unwrap_model(ddp), optimizer.optimizer.state_dict())


def accumulate_save_and_resume(rank: int, folder: str) -> Trained:
    """Two micro-batches a step, a checkpoint in between that is loaded at once, and on."""
    accelerator, ddp, optimizer = prepared(rank, gradient_accumulation_steps=2)
    dataset = [(inputs[0], targets[0]) for inputs, targets in batches(0, 40, size=1)]
    loader = accelerator.prepare(DataLoader(dataset, batch_size=4))
    checkpoint = Path(folder, type(ddp).__module__)
    for number, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(ddp):
            accelerator.backward(mse_loss(ddp(inputs), targets))
            assert ddp.require_backward_grad_sync or not accelerator.sync_gradients
            optimizer.step()
            optimizer.zero_grad()
        if number == 1:
            accelerator.save_state(str(checkpoint))
            accelerator.wait_for_everyone()
        if number == 3:
            accelerator.load_state(str(checkpoint))
    return outcome(accelerator, ddp, optimizer)


def test_accumulation_and_checkpoints(pair, tmp_path: Path) -> None:
    expect_same_bits(pair, accumulate_save_and_resume, str(tmp_path))


def synchronise_late(rank: int) -> Trained:
    """`trigger_sync_in_backward` synchronises a backward whose forward ran under `no_sync`."""
    accelerator, ddp, optimizer = prepared(rank)
    data = batches(rank, 8)
    for (inputs, targets), (more_inputs, more_targets) in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        with accelerator.no_sync(ddp):
            loss = mse_loss(ddp(inputs), targets)
            last = mse_loss(ddp(more_inputs), more_targets)
            accelerator.backward(loss)
        with accelerator.trigger_sync_in_backward(ddp):
            accelerator.backward(last)
        optimizer.step()
    return outcome(accelerator, ddp, optimizer)


def test_trigger_sync_in_backward(pair) -> None:
    expect_same_bits(pair, synchronise_late)


def with_options_and_hook(rank: int, comm_hook: str, comm_wrapper: str) -> Trained:
    """The constructor's options and torch's communication hooks, both by way of Accelerate."""
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(
        bucket_cap_mb=1,
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
        comm_hook=DDPCommunicationHookType(comm_hook),
        comm_wrapper=DDPCommunicationHookType(comm_wrapper),
    )
    accelerator, ddp, optimizer = prepared(rank, kwargs_handlers=[handler])
    for inputs, targets in batches(rank, 4):
        optimizer.zero_grad()
        accelerator.backward(mse_loss(ddp(inputs), targets))
        accelerator.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
    return outcome(accelerator, ddp, optimizer)


def test_options_and_communication_hooks(pair) -> None:
    expect_same_bits(pair, with_options_and_hook, "fp16", "no")
    expect_same_bits(pair, with_options_and_hook, "power_sgd", "fp16")
