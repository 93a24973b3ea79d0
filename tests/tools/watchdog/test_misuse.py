"""A wrapper that is not used, ranks that train on the same data, and what only looks like it. In one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from minddp.tools.watchdog.check import ALONE
from minddp.tools.watchdog.misuse import BATCHES, SameDataCheck
from tests.tools.watchdog.fleet import Fleet


def averages_parameters(fleet: Fleet) -> None:
    fleet.alone(2 * ALONE, averages_every=8)


def averages_gradients(fleet: Fleet) -> None:
    for step in range(2 * ALONE):
        fleet.step_alone(step, step)


def skips_two_steps(fleet: Fleet) -> None:
    """Rank 1 skips the first two, and then takes over what rank 0 has."""
    for step in range(2 * ALONE):
        if step == 2:
            fleet.heal()
        fleet.step_alone(step, step if step >= 2 else None)


def has_two_optimizers(fleet: Fleet) -> None:
    """They count apart."""
    first = fleet.optimizers
    second = [type(optimizer)(optimizer.param_groups[0]["params"], lr=0.5) for optimizer in first]
    for _ in range(ALONE // 2 + 1):
        for fleet.optimizers in (first, second):
            fleet.step_alone(0, 1)


@pytest.mark.parametrize("train", [averages_parameters, averages_gradients, skips_two_steps, has_two_optimizers])
def test_a_script_may_average_by_itself(train: Callable[[Fleet], None]) -> None:
    fleet = Fleet(2)
    train(fleet)
    assert fleet.exchange() == []


def test_forwards_of_which_one_was_outside_of_no_sync_are_not_blamed_on_it() -> None:
    fleet = Fleet(2)
    for rank in range(2):
        for synchronises in [False] * ALONE + [True]:
            fleet.call(rank, "post_forward", synchronises)
    fleet.alone(ALONE)
    (finding,) = fleet.exchange()
    assert "Call the wrapper, not `ddp.module`" in finding.text


# ---------------------------------------------------------------------- the same data


def found(batch: Callable[[int, int], torch.Tensor], steps: int = BATCHES, ranks: int = 3) -> list[str]:
    """The findings when rank `rank` gets `batch(step, rank)` in each step."""
    checks = [SameDataCheck() for _ in range(ranks)]
    notes = []
    for rank, check in enumerate(checks):
        for step in range(steps):
            check.before_module(step, (), {"options": {"x": batch(step, rank)}})
            check.before_module(step, (torch.rand(20),), {})  # a further forward before the same backward
        notes += [prints for _, prints in check.take_notes()]
        assert check.take_notes() == []
    return [finding.text for finding in checks[0].compare(0, notes)] if notes else []


def test_equal_batches_on_all_ranks_are_named_once() -> None:
    (text,) = found(lambda step, rank: torch.arange(16) + step)
    assert "All 3 ranks train on the same data" in text
    assert "DistributedSampler" in text
    assert found(lambda step, rank: torch.arange(16) + step, steps=BATCHES - 1) == [], "a few prove nothing"


@pytest.mark.parametrize(
    "batch",
    [
        lambda step, rank: torch.arange(16) + step + (rank == 2),
        lambda step, rank: torch.ones(16),  # synthetic
        lambda step, rank: torch.ones(16) * (step % 2),
        lambda step, rank: torch.tensor([step]),  # no data, but an option
        lambda step, rank: torch.eye(8).to_sparse() * step,
    ],
    ids=["one rank differs", "constant", "alternating", "scalar", "sparse"],
)
def test_other_batches_are_no_finding(batch: Callable[[int, int], torch.Tensor]) -> None:
    assert found(batch) == []


def order_of(steps: list[int]) -> list[str]:
    """The findings when the batches of these numbers follow each other, and the notes are read in between."""
    check, notes = SameDataCheck(), []
    for step, number in enumerate(steps):
        check.before_module(step, (torch.arange(16.0).view(4, 4).t() + number,), {})
        notes += check.take_notes() if step % 3 == 0 else []
    notes += check.take_notes(is_last=True)
    return [
        found.text for number, note in notes if number == BATCHES for found in check.compare(number, [note] * 2)
    ]


def test_a_second_epoch_in_the_same_order_is_named() -> None:
    (text,) = order_of([*range(12), *range(12), *range(12)])
    assert "the batches of steps 12 to 19 are the first 8 again" in text
    assert "`sampler.set_epoch(epoch)`" in text


@pytest.mark.parametrize(
    "steps",
    [
        [*range(12), *reversed(range(12))],
        [*range(30)],
        [*range(5)] * 6,
        [0] * 40,
        [*range(12), 0, 1, 2, 3, 4, 5, 7],
    ],
    ids=["another order", "one epoch", "five batches", "one batch", "a part"],
)
def test_other_orders_are_no_finding(steps: list[int]) -> None:
    assert order_of(steps) == []
