"""Replicas that drift: what is said of which parameter, ranks, steps and cause. In one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from minddp.tools.watchdog.check import EVERY
from minddp.tools.watchdog.drift import DriftCheck
from tests.tools.watchdog.fleet import Fleet

BLOCK = 10  # steps
Act = Callable[[Fleet], object]


@torch.no_grad()
def write(param: torch.Tensor) -> None:
    param.view(-1)[-1].add_(1.0)


def write_to(rank: int) -> Act:
    return lambda fleet: write(fleet.modules[rank][0].weight)


def change_learning_rate(fleet: Fleet) -> None:
    fleet.optimizers[1].param_groups[0]["lr"] = 0.25


def write_where_options_print_differently(fleet: Fleet) -> None:
    for optimizer in fleet.optimizers:
        optimizer.param_groups[0]["schedule"] = object()
    write_to(1)(fleet)


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (change_learning_rate, "`lr of group 0` is 0.125 on ranks 0 and 2, but 0.25 on rank 1"),
        (
            write_where_options_print_differently,
            "something has written to the parameters or to `.grad` on rank 1, such as `load_state_dict`",
        ),
        (
            lambda fleet: fleet.alone(2),
            f"An optimizer made {EVERY + 2} steps for {EVERY} synchronised backwards",
        ),
    ],
)
def test_what_happens_between_two_sampled_steps_is_dated_and_explained(happens: Act, words: str) -> None:
    fleet = Fleet(3)
    fleet.steps(2 * EVERY + 3)
    assert fleet.exchange() == []
    happens(fleet)
    fleet.steps(EVERY - 2)  # the last is sampled
    (finding,) = fleet.end()
    assert f"equal in step {2 * EVERY}, different in step {3 * EVERY}" in finding.text
    assert words in finding.text
    assert "schedule" not in finding.text


def test_one_element_of_one_parameter_is_found() -> None:
    fleet = Fleet(2, lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(40))))
    fleet.steps(2 * BLOCK)
    write(fleet.modules[1][9].weight)
    fleet.steps(EVERY)
    (finding,) = fleet.exchange()
    assert "Rank 0 and rank 1 have different values of `9.weight` (equal in step 19, different in" in finding.text


def test_weights_may_differ_while_backward_runs() -> None:
    """As with SAM, whose perturbation is each rank's own."""
    fleet = Fleet(2)
    for step in range(4):
        for rank, module in enumerate(fleet.modules):
            weight = module[0].weight.detach()
            before = weight.clone()
            weight.mul_(1.0 + rank)
            fleet.call(rank, "first_gradient", step)
            fleet.give_gradients(rank, step)
            fleet.call(rank, "post_backward")
            weight.copy_(before)
            fleet.optimize(rank)
    assert fleet.end() == []


@pytest.mark.parametrize("num_steps_before", [0, 3])
def test_a_script_may_step_without_an_optimizer(num_steps_before: int) -> None:
    fleet = Fleet(2)
    fleet.optimize = lambda rank: None if fleet.num_steps >= num_steps_before else Fleet.optimize(fleet, rank)
    fleet.steps(num_steps_before + 2)
    write_to(1)(fleet)
    fleet.steps(3)
    (finding,) = fleet.end()
    since = num_steps_before + 2 - bool(num_steps_before)  # else the last weights are read before the next backward
    assert f"equal in step {since - 1}, different in step {since}" in finding.text


def test_a_backward_that_one_rank_dropped_before_its_first_gradient_is_the_same_step_again() -> None:
    fleet = Fleet(2)
    fleet.steps(3)
    fleet.call(1, "first_gradient", 3)
    fleet.give_gradients(1, 1000)
    fleet.call(1, "post_backward")
    for module in fleet.modules:  # the scripts load a checkpoint
        write(module[0].weight)
    fleet.steps(3)
    assert fleet.end() == []
    assert fleet.exchanges[0]._received["drift"] == {}


def steps(number: int) -> Act:
    return lambda fleet: fleet.steps(number)


def transpose(*ranks: int) -> Act:
    """Other strides, equal values."""

    def act(fleet: Fleet) -> None:
        for rank in ranks:
            weight = fleet.modules[rank][0].weight
            weight.data = weight.data.t().contiguous().t()

    return act


def free(fleet: Fleet) -> None:
    """One rank's parameter, in a step that the others do not make."""
    fleet.modules[0][0].weight.data.untyped_storage().resize_(0)
    fleet.call(0, "first_gradient", fleet.num_steps)
    fleet.call(0, "post_backward")


class PostLocalSGDState: ...


def post_local_sgd(fleet: Fleet) -> None:
    for rank in range(2):
        fleet.call(rank, "communication_hook", "post_localSGD_hook", PostLocalSGDState())


def rank_1_has_joined(fleet: Fleet) -> None:
    """It has no records of the others' steps, and no reason to be equal in them."""
    joined, fleet.checks[1] = fleet.checks[1], {}
    fleet.steps(2 * BLOCK)
    fleet.checks[1] = joined


@pytest.mark.parametrize(
    "acts",
    [
        [steps(10 * BLOCK + 3)],
        [steps(3), transpose(0), steps(BLOCK)],
        [steps(3), transpose(0, 1), steps(BLOCK), free],
        [post_local_sgd, steps(5), lambda fleet: fleet.alone(1), steps(2 * BLOCK)],
        [steps(4), rank_1_has_joined, Fleet.heal, steps(3 * BLOCK)],
    ],
    ids=["equal", "stored otherwise", "replaced and freed", "post-local SGD", "join"],
)
def test_what_is_no_finding(acts: list[Act]) -> None:
    fleet = Fleet(2)
    for act in acts:
        act(fleet)
    assert fleet.exchange(8) == []
    assert fleet.end() == []


def test_replicas_that_begin_differently_on_purpose_have_time() -> None:
    fleet = Fleet(2, starts_equal=False)
    write_to(0)(fleet)
    fleet.steps(3 * BLOCK)
    assert fleet.exchange() == []
    fleet.steps(3 * EVERY)
    (finding,) = fleet.exchange(10)
    assert "since the first step" in finding.text


def test_replicas_that_have_been_healed_are_no_finding_until_they_part_again() -> None:
    fleet = Fleet(2, starts_equal=False)
    write_to(0)(fleet)
    fleet.steps(BLOCK + 1)
    fleet.heal()
    fleet.steps(4 * BLOCK)
    assert fleet.exchange(8) == []
    write_to(0)(fleet)
    fleet.steps(2 * EVERY)
    assert len(fleet.exchange(8)) == 1


# ---------------------------------------------------------------------- where nobody knows what averages


def patient() -> Fleet:
    fleet = Fleet(2)
    for module, checks in zip(fleet.modules, fleet.checks, strict=True):
        checks["drift"] = DriftCheck([*module.named_parameters()], starts_equal=True, patience=20)
    return fleet


def give_own_gradients(fleet: Fleet) -> Callable[[int, int], object]:
    return lambda step, rank: fleet.give_gradients(rank, 100 * step + rank)


@pytest.mark.parametrize("every", [2, 8, 15])
def test_parameters_that_are_averaged_later_are_no_finding(every: int) -> None:
    fleet = patient()
    for step in range(150):
        fleet.steps(1, act=give_own_gradients(fleet))
        if step % every == every - 1:
            fleet.average()
    assert fleet.exchange(20) == []
