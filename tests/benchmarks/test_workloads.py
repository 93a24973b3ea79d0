"""The models are the size they claim to be, and their gradients are healthy numbers."""

from __future__ import annotations

import pytest
import torch

from benchmarks.workloads import WorkloadName, orthogonal_chain, training_step, workload


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"), [("many_small", 400, 832_000), ("transformer", 53, 1_890_432)]
)
def test_sizes(name: WorkloadName, tensors: int, parameters: int):
    model = workload(name).model()
    assert len(list(model.parameters())) == tensors
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("name", ["many_small", "transformer"])
def test_a_step_moves_every_parameter_and_no_gradient_vanishes(name: WorkloadName):
    torch.manual_seed(0)
    task = workload(name)
    model = task.model()
    before = [p.detach().clone() for p in model.parameters()]
    training_step(model, task, rank=0)()
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 1e-6
        assert not torch.equal(old, parameter)


def test_ranks_train_on_different_batches():
    task = workload("transformer")
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
