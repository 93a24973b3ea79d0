"""Replicas that drift: what is said of which parameter, ranks, steps and cause. In one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from minddp.tools.watchdog.check import EVERY
from minddp.tools.watchdog.drift import DriftCheck
from tests.tools.watchdog.fleet import Fleet

BLOCK = 10  # steps


@torch.no_grad()
def write(param: torch.Tensor, add: float = 1.0) -> None:
    param.view(-1)[-1].add_(add)


def test_equal_replicas_are_no_finding() -> None:
    fleet = Fleet(3)
    fleet.steps(10 * BLOCK + 3)
    assert fleet.exchange() == []
    assert fleet.end() == []


@pytest.mark.parametrize("at_end", [False, True])
def test_another_learning_rate_is_named_on_each_rank(at_end: bool) -> None:
    fleet = Fleet(3, lr_of_rank={1: 0.25})
    fleet.steps(5 if at_end else 3 * BLOCK)
    (finding,) = fleet.end() if at_end else fleet.exchange()
    assert finding.text.startswith("The replicas differ. Rank 1 has other values of `0.bias`, `0.weight`, ")
    assert "than ranks 0 and 2 (equal in step 0, different in step 1)" in finding.text
    assert "`lr of group 0` is 0.125 on ranks 0 and 2, but 0.25 on rank 1" in finding.text
    assert finding.ranks == (1,)
    assert finding.step == 1


def test_a_write_on_one_rank_between_steps_is_dated() -> None:
    fleet = Fleet(3)
    fleet.steps(BLOCK + 4)
    with torch.no_grad():
        fleet.modules[2][0].weight[0, 0] += 1
    fleet.steps(BLOCK + 1)
    (finding,) = fleet.exchange()
    assert f"equal in step {BLOCK + 3}, different in step {BLOCK + 4}" in finding.text
    assert (
        "something has written to the parameters or to `.grad` on rank 2, such as `load_state_dict`" in finding.text
    )


def test_one_element_of_one_parameter_is_found() -> None:
    fleet = Fleet(2, lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(40))))
    fleet.steps(2 * BLOCK)
    assert fleet.exchange() == []
    write(fleet.modules[1][9].weight)
    fleet.steps(6 * BLOCK)
    (finding,) = fleet.exchange(8)
    assert "Rank 0 and rank 1 have different values of `9.weight`" in finding.text
    assert "no hyperparameter is known to differ: something has written" in finding.text
    first, last = finding.text.partition("equal in step ")[2].partition(")")[0].split(", different in step ")
    assert int(first) < 2 * BLOCK <= int(last) < 2 * BLOCK + EVERY


def test_a_different_state_of_the_optimizer_is_found() -> None:
    fleet = Fleet(2)
    fleet.steps(BLOCK)
    for state in fleet.optimizers[1].state.values():
        state["momentum_buffer"].mul_(2)
    fleet.steps(BLOCK + 1)
    (finding,) = fleet.exchange()
    assert "or the optimizer's state differs" in finding.text
    assert "ddp.synchronize(optimizer=optimizer)" in finding.text


def change_learning_rate(fleet: Fleet) -> None:
    fleet.optimizers[1].param_groups[0]["lr"] = 0.25


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (change_learning_rate, "`lr of group 0` is 0.125 on rank 0, but 0.25 on rank 1"),
        (lambda fleet: write(fleet.modules[1][0].weight[:1, :1]), "something has written to the parameters"),
        (lambda fleet: fleet.alone(2), f"An optimizer made {EVERY + 2} steps for {EVERY} synchronised backwards"),
    ],
    ids=["learning rate", "write", "bypass"],
)
def test_what_happens_between_recorded_steps_is_dated_and_explained(
    happens: Callable[[Fleet], object], words: str
) -> None:
    fleet = Fleet(2)
    fleet.steps(2 * EVERY + 3)
    happens(fleet)
    fleet.steps(EVERY - 2)  # until the next recorded one, which is the last
    (finding,) = fleet.end()
    assert f"equal in step {2 * EVERY}, different in step {3 * EVERY}" in finding.text
    assert words in finding.text


def test_hyperparameters_that_print_differently_are_no_cause() -> None:
    fleet = Fleet(2)
    for optimizer in fleet.optimizers:
        optimizer.param_groups[0]["schedule"] = object()
    fleet.steps(BLOCK)
    write(fleet.modules[1][0].weight[:1, :1])
    fleet.steps(BLOCK)
    (finding,) = fleet.end()
    assert "schedule" not in finding.text
    assert "something has written to the parameters" in finding.text


def test_a_parameter_that_one_rank_stores_otherwise_is_equal() -> None:
    fleet = Fleet(2)
    fleet.steps(3)
    fleet.modules[0][0].weight.data = fleet.modules[0][0].weight.data.t().contiguous().t()  # no longer contiguous
    fleet.steps(3)
    assert fleet.end() == []


def test_gradients_that_differ_after_averaging_name_the_hook() -> None:
    fleet = Fleet(2)
    for rank in range(2):
        fleet.call(rank, "communication_hook", "my_hook", None)
    fleet.steps(BLOCK, act=lambda step, rank: write(fleet.modules[rank][0].weight.grad[:1, :1], rank * (step == 4)))
    fleet.steps(BLOCK + 1)
    (finding,) = fleet.exchange()
    assert (
        "were different already: the communication hook `my_hook` returns different ones on each rank"
        in finding.text
    )
    assert "equal in step 4, different in step 5" in finding.text


def test_steps_without_a_synchronised_backward_are_counted() -> None:
    fleet = Fleet(2)
    fleet.steps(BLOCK)
    fleet.alone(3)
    fleet.steps(BLOCK + 1)
    (finding,) = fleet.exchange()
    assert "An optimizer made 4 steps for 1 synchronised backward: gradients were not averaged" in finding.text


def test_weights_loaded_on_one_rank_after_wrapping() -> None:
    fleet = Fleet(3)
    write(fleet.modules[0][0].weight.view(-1)[:1])
    fleet.steps(5)
    (finding,) = fleet.end()
    assert "Rank 0 has other values of `0.weight` than ranks 1 and 2 (since the first step)" in finding.text
    assert "loaded or changed on one rank after the module was wrapped" in finding.text


def test_replicas_that_begin_differently_on_purpose_have_time() -> None:
    fleet = Fleet(2, starts_equal=False)
    write(fleet.modules[0][0].weight.view(-1)[:1])
    fleet.steps(3 * BLOCK)
    assert fleet.exchange() == []
    fleet.steps(3 * EVERY)
    (finding,) = fleet.exchange(10)
    assert "since the first step" in finding.text


def test_replicas_that_have_been_healed_are_no_finding_until_they_part_again() -> None:
    fleet = Fleet(2, starts_equal=False)
    write(fleet.modules[0][0].weight.view(-1)[:1])
    fleet.steps(BLOCK + 1)
    fleet.average()
    fleet.optimizers[1].load_state_dict(copy.deepcopy(fleet.optimizers[0].state_dict()))
    fleet.steps(4 * BLOCK)
    assert fleet.exchange(8) == []
    fleet.exchange()
    write(fleet.modules[0][0].weight.view(-1)[:1])
    fleet.steps(2 * EVERY)
    assert len(fleet.exchange(8)) == 1


def test_post_local_sgd_lets_replicas_differ() -> None:
    class PostLocalSGDState: ...

    fleet = Fleet(2)
    for checks in fleet.checks:
        checks["drift"].communication_hook("post_localSGD_hook", PostLocalSGDState())
    fleet.steps(5)
    fleet.alone(1)
    fleet.steps(2 * BLOCK)
    assert fleet.exchange() == []
    assert fleet.end() == []


def test_steps_that_one_rank_has_not_made_are_not_compared() -> None:
    """A rank that has joined has no records of the others' steps, and no reason to be equal in them."""
    fleet = Fleet(2)
    fleet.steps(4)
    joined = fleet.checks[1]
    fleet.checks[1] = {}
    fleet.steps(2 * BLOCK)
    fleet.checks[1] = joined
    for own, other in zip(*(module.parameters() for module in fleet.modules), strict=True):
        other.data.copy_(own.data)
    fleet.optimizers[1].load_state_dict(copy.deepcopy(fleet.optimizers[0].state_dict()))
    fleet.steps(3 * BLOCK)
    assert fleet.exchange(8) == []
    assert fleet.end() == []


def test_a_parameter_may_be_replaced_and_freed() -> None:
    fleet = Fleet(2)
    fleet.steps(3)
    for module in fleet.modules:
        module[0].weight.data = module[0].weight.data.t().contiguous().t()  # other strides, equal values
        module[2].weight.data = module[2].weight.data.clone()
    fleet.steps(BLOCK)
    assert fleet.exchange() == []
    storage = fleet.modules[0][0].weight.data.untyped_storage()
    storage.resize_(0)
    fleet.call(0, "first_gradient", fleet.num_steps)
    fleet.call(0, "post_backward")
    assert fleet.end() == []


# ---------------------------------------------------------------------- where nobody knows what averages


def patient() -> Fleet:
    fleet = Fleet(2)
    for number, checks in enumerate(fleet.checks):
        params = list(fleet.modules[number].named_parameters())
        checks["drift"] = DriftCheck(params, starts_equal=True, patience=20, reducer="")
    return fleet


def give_own_gradients(fleet: Fleet) -> Callable[[int, int], object]:
    return lambda step, rank: fleet.give_gradients(rank, 100 * step + rank)


def test_gradients_that_nobody_averages_are_named_after_a_while() -> None:
    fleet = patient()
    fleet.steps(19, act=give_own_gradients(fleet))
    assert fleet.exchange() == []
    fleet.steps(10, act=give_own_gradients(fleet))
    (finding,) = fleet.exchange(8)
    assert "equal in step 0, different in step 1" in finding.text
    assert "they are not averaged. Wrap the module in DistributedDataParallel" in finding.text


@pytest.mark.parametrize("every", [2, 8, 15])
def test_parameters_that_are_averaged_later_are_no_finding(every: int) -> None:
    fleet = patient()
    for step in range(150):
        fleet.steps(1, act=give_own_gradients(fleet))
        if step % every == every - 1:
            fleet.average()
    assert fleet.exchange(20) == []


def test_learning_rates_of_ranks_that_each_step_a_part_are_named() -> None:
    fleet = Fleet(2)
    for rank, lr in enumerate((0.1, 0.2)):
        fleet.optimizers[rank].param_groups[0]["lr"] = lr
    for _ in range(3):
        fleet.steps(1)
        fleet.average()
        fleet.modules[1].load_state_dict(fleet.modules[0].state_dict())
    (finding,) = fleet.exchange()
    assert "`lr of group 0` is 0.1 on rank 0, but 0.2 on rank 1" in finding.text
