"""The models are the size they claim to be, and their gradients are healthy numbers."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from benchmarks.workloads import WorkloadName, orthogonal_chain, training_step, workload

NAMES = get_args(WorkloadName)


@pytest.mark.parametrize(
    ("name", "size", "tensors", "parameters"),
    [
        ("many_small", "full", 400, 832_000),
        ("transformer", "full", 53, 1_890_432),
        ("convnet", "full", 26, 601_514),
        ("embedding", "full", 5, 65_536 * 128 + 131_712),
        ("short", "full", 24, 789_504),
        ("many_small", "gpu", 2000, pytest.approx(4.2e6, rel=0.01)),
        ("transformer", "gpu", 149, pytest.approx(162.6e6, rel=0.01)),
        ("convnet", "gpu", 40, pytest.approx(39.4e6, rel=0.01)),
    ],
)
def test_sizes(name: WorkloadName, size: Any, tensors: int, parameters: Any):
    with torch.device("meta"):
        found = list(workload(name, size).model().parameters())
    assert len(found) == tensors
    assert sum(p.numel() for p in found) == parameters


def _largest(grad: Tensor) -> float:
    return (grad._values() if grad.is_sparse else grad).abs().max().item()


@pytest.mark.parametrize("name", ["many_small", "transformer", "convnet", "embedding_sparse"])
def test_a_step_moves_every_parameter_and_no_gradient_vanishes(name: WorkloadName):
    torch.manual_seed(0)
    task = workload(name)
    model = task.model()
    before = [p.detach().clone() for p in model.parameters()]
    training_step(model, task, rank=0)()
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert _largest(parameter.grad) > 1e-6
        assert not torch.equal(old, parameter)


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_one_has_the_same_parts(name: WorkloadName):
    tiny, full = workload(name, "tiny"), workload(name)
    model = tiny.model()
    assert sum(p.numel() for p in model.parameters()) < 20_000
    assert (
        (tiny.name, tiny.has_sparse_gradients) == (full.name, full.has_sparse_gradients) == (name, "sparse" in name)
    )
    assert any(isinstance(part, nn.BatchNorm2d) for part in model.modules()) == (name == "convnet")
    training_step(model, tiny, rank=0)()
    is_sparse = [p.grad is not None and p.grad.is_sparse for p in model.parameters()]
    assert any(is_sparse) == tiny.has_sparse_gradients


def test_ranks_train_on_different_batches():
    task = workload("transformer", "tiny")
    weights = []
    for rank in (0, 1, 0):
        torch.manual_seed(0)
        model = task.model()
        training_step(model, task, rank)()
        weights.append(next(model.parameters()).detach())
    assert torch.equal(weights[0], weights[2]), "the same rank repeats itself"
    assert not torch.equal(weights[0], weights[1])


def test_the_chain_keeps_the_norm_of_what_passes_through():
    chain = orthogonal_chain(depth=50, width=16)
    inputs = torch.randn(8, 16)
    torch.testing.assert_close(chain(inputs).norm(dim=1), inputs.norm(dim=1), rtol=1e-3, atol=1e-3)
