"""The oracle against gradients worked out by hand, and the conditions under which its two forms agree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from reference import oracle
from tests.reference.cases import CASES, build, loss_of, shards_for

ROUNDING = 1e-14


def line(slope: float) -> nn.Module:
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(module.weight, slope)
    return module


def mean_square(module: nn.Module, examples: Tensor) -> Tensor:
    return module(examples).square().mean()


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def test_a_gradient_worked_out_by_hand():
    # d/dw mean((w x)^2) = mean(2 w x^2); with w = 3: shard [1, 2] gives 15, shard [4] gives 96.
    shards = [column(1, 2), column(4)]
    assert oracle.gradients(line(3), shards[0], mean_square)["weight"].item() == 15
    assert oracle.mean_over_ranks(line(3), shards, mean_square)["weight"].item() == (15 + 96) / 2
    assert oracle.gradients(line(3), torch.cat([*shards]), mean_square)["weight"].item() == 6 * (1 + 4 + 16) / 3


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"batch_norm", "two_dtypes"}))
def test_mean_over_ranks_is_the_whole_batch_for_equal_shards_and_a_mean_loss(case):
    module, shards = build(case, seed=0), shards_for(3)
    by_rank = oracle.mean_over_ranks(module, shards, loss_of)
    whole = oracle.gradients(module, torch.cat([*shards]), loss_of)
    assert oracle.largest_difference(by_rank, whole) < ROUNDING


def test_they_differ_where_an_example_is_normalised_with_its_shard():
    module, shards = build("batch_norm", seed=0), shards_for(3)
    by_rank = oracle.mean_over_ranks(module, shards, loss_of)
    whole = oracle.gradients(module, torch.cat([*shards]), loss_of)
    assert oracle.largest_difference(by_rank, whole) > 1e-3


def test_the_whole_batch_of_a_sum_is_as_many_times_larger_as_there_are_ranks():
    module, shards = build("plain", seed=0), shards_for(3)
    by_rank = oracle.mean_over_ranks(module, shards, lambda m, x: m(x).square().sum())
    whole = oracle.gradients(module, torch.cat([*shards]), lambda m, x: m(x).square().sum())
    tripled = {name: 3 * grad for name, grad in by_rank.items()}
    assert oracle.largest_difference(tripled, whole) < 1e-12


def test_the_module_is_left_untouched():
    module = build("batch_norm", seed=0)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    oracle.mean_over_ranks(module, shards_for(2), loss_of)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(param.grad is None for param in module.parameters())


def test_frozen_parameters_have_no_gradient():
    grads = oracle.mean_over_ranks(build("frozen", seed=0), shards_for(2), loss_of)
    assert sorted(grads) == ["0.bias", "2.weight", "4.bias", "4.weight"]


def test_largest_difference_refuses_gradients_of_different_parameters():
    with pytest.raises(ValueError, match=r"\['b', 'w'\]"):
        oracle.largest_difference({"w": torch.zeros(1)}, {"b": torch.zeros(1)})
