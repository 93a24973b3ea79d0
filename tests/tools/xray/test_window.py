from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import minddp
from minddp.tools.xray.reading import steps_of
from minddp.tools.xray.wrappers import Wrappers
from tests.ranks import RankPool

Loop = list[int]  # the numbers of steps that were recorded


def wrapped() -> nn.Module:
    torch.manual_seed(0)
    return minddp.DistributedDataParallel(nn.Linear(8, 8))


def step(ddp: nn.Module) -> None:
    ddp(torch.ones(2, 8)).sum().backward()


def numbered(rank: int, first: int, last: int, steps: int) -> Loop:
    kept: list[Any] = []
    wrappers = Wrappers(range(first, last), "numbered", [], then=kept.append)
    ddp = wrapped()
    for _ in range(steps):
        step(ddp)
    wrappers.close()
    return [step.number for xray in kept for step in steps_of(xray.result.recording)]


@pytest.mark.parametrize(
    ("arguments", "recorded"),
    [((3, 5, 8), [3, 4]), ((3, 5, 5), [3, 4]), ((3, 9, 5), [3, 4]), ((0, 1, 2), [0])],
    ids=["middle", "ends with the loop", "loop ends first", "from the first"],
)
def test_the_steps_of_the_window_are_recorded(
    ranks: Callable[[int], RankPool], arguments: tuple[int, int, int], recorded: Loop
) -> None:
    assert ranks(2).run(numbered, *arguments)[0] == recorded


def never_reached(rank: int) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("minddp.tools.xray.wrappers").addHandler(handler)
    assert numbered(rank, 10, 12, 2) == []
    return messages


def test_a_window_that_is_never_reached_says_so(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(never_reached)[0] == ["Steps 10:12 were never reached, so there is no x-ray."]


def found(rank: int, kind: str) -> tuple[Loop, int]:
    """Neither the module nor the step is given."""
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
    steps = steps_of(xray.result.recording)
    return [s.number for s in steps], sum(span.activity.value == "forward" for span in steps[0].ranks[0].spans)


@pytest.mark.parametrize("kind", ["minddp", "torch"])
def test_the_first_wrapper_that_trains_is_found(ranks: Callable[[int], RankPool], kind: str) -> None:
    """A step that accumulates begins with its first forward."""
    assert ranks(2).run(found, kind)[0] == ([2, 3], 2)
