from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import minddp
from minddp.tools.xray import wrappers
from minddp.tools.xray.reading import steps_of
from minddp.tools.xray.timeline import Activity
from minddp.tools.xray.wrappers import Wrappers
from tests.ranks import on_ranks


def wrapped() -> nn.Module:
    torch.manual_seed(0)
    return minddp.DistributedDataParallel(nn.Linear(8, 8))


def step(ddp: nn.Module) -> None:
    ddp(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize(
    ("first", "last", "steps", "recorded"),
    [(3, 5, 8, [3, 4]), (3, 5, 5, [3, 4]), (3, 9, 5, [3, 4]), (0, 1, 2, [0]), (10, 12, 2, [])],
    ids=["middle", "ends with the loop", "loop ends first", "from the first", "never reached"],
)
@on_ranks(2)
def test_the_steps_of_the_window_are_recorded(
    rank: int, first: int, last: int, steps: int, recorded: list[int]
) -> None:
    kept: list[Any] = []
    window = Wrappers(range(first, last), "numbered", [], then=kept.append)
    ddp = wrapped()
    for _ in range(steps):
        step(ddp)
    with mock.patch.object(wrappers._log, "warning") as warning:
        window.close()
    assert [step.number for xray in kept for step in steps_of(xray.recording)] == recorded
    never = [mock.call("Steps %s were never reached, so there is no x-ray.", "10:12")]
    assert warning.mock_calls == ([] if recorded else never)


@pytest.mark.parametrize("kind", ["minddp", "torch"])
@on_ranks(2)
def test_the_first_wrapper_that_trains_is_found(rank: int, kind: str) -> None:
    """A step that accumulates begins with its first forward. Neither the module nor the step is given."""
    kept: list[Any] = []
    first = Wrappers(range(2, 4), "found", [], then=kept.append)
    ddp = wrapped() if kind == "minddp" else nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    with torch.no_grad():
        ddp(torch.ones(2, 8))
    for _ in range(5):
        with ddp.no_sync():
            step(ddp)
        step(ddp)
    first.close()
    (xray,) = kept
    steps = steps_of(xray.recording)
    assert [step.number for step in steps] == [2, 3]
    assert sum(span.activity is Activity.FORWARD for span in steps[0].ranks[0].spans) == 2
