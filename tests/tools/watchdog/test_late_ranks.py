"""Real ranks of which one is late: it is named, with the phase and most of what the others wait."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from docs.learning.quotes import blocks
from minddp.tools.watchdog import check as schedule
from minddp.tools.watchdog import comparison, slow_rank
from minddp.tools.watchdog.check import Finding
from minddp.tools.watchdog.slow_rank import PHASES, WARM_UP_STEPS, LateRank, late_ranks
from tests.tools.watchdog.harness import DOCS, close, wait_until

PLACES = ("between", "forward", "backward", "optimizer", "accumulation")
WINDOW_STEPS = 7
DELAY_S = 0.1  # long beside the time for which other programs may take a core


@dataclass(frozen=True)
class Delay:
    """`rank`, or each, sleeps for `seconds` at a place of each step that is compared."""

    rank: int | None = 1
    place: str = "between"
    seconds: float = 0.02

    def sleep(self, place: str, rank: int, step: int) -> float:
        """The seconds for which it has slept, which a loaded machine makes longer."""
        if place != self.place or self.rank not in (rank, None) or step < WARM_UP_STEPS:
            return 0.0
        began = time.perf_counter()
        time.sleep(self.seconds)
        return time.perf_counter() - began


@dataclass(frozen=True)
class Outcome:
    """A rank's median sleep; on rank 0 the findings, and the late ranks of the first window."""

    found: list[Finding]
    late: list[LateRank]
    slept_s: float


def train(rank: int, delay: Delay, steps: int, window_steps: int, options: Mapping[str, Any] = {}) -> Outcome:
    """Some steps of a wrapped model with buffers, and then a wait until those of a window have been compared."""
    step = 0
    slept_s = []
    judged: list[list[LateRank]] = []

    def judge(steps: Sequence[Sequence[Sequence[float]]]) -> list[LateRank]:
        judged.append(late_ranks(steps))
        return judged[-1]

    def sleep(place: str) -> None:
        if seconds := delay.sleep(place, rank, step):
            slept_s.append(seconds)

    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    module.register_forward_pre_hook(lambda *_: sleep("forward"))
    module.register_full_backward_pre_hook(lambda *_: sleep("backward"))
    with (
        mock.patch.object(comparison, "EVERY_S", 0.05),
        mock.patch.object(schedule, "FIRST", steps),
        mock.patch.multiple(slow_rank, WINDOW_STEPS=window_steps, WINDOW_S=0.0, late_ranks=judge),
    ):
        ddp = minddp.DistributedDataParallel(module, **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        optimizer.register_step_pre_hook(lambda *_: sleep("optimizer"))  # called after the guard's
        assert ddp.guard is not None
        x = torch.randn(16, 32)
        for step in range(steps):  # noqa: B007
            sleep("between")
            if delay.place == "accumulation":
                with ddp.no_sync():
                    ddp(x).sum().backward()
                    sleep("accumulation")
            ddp(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        wait_until(lambda: rank != 0 or judged)
        dist.barrier()
        close(ddp)
    return Outcome([*ddp.guard.findings], judged[0] if judged else [], statistics.median(slept_s or [0.0]))


@pytest.mark.parametrize(
    ("world_size", "rank", "place", "options"),
    [
        *((3, 1, place, {}) for place in PLACES),
        (3, 0, "between", {}),  # the others wait for its buffers before forward, none at the end of backward
        (2, 1, "backward", {"transport": "process_group"}),
        (2, 1, "backward", {"find_unused_parameters": True}),  # whose exchange is waited for as well
        (2, 1, "backward", {"gradient_as_bucket_view": True, "forward_sync_buffers": False}),
    ],
)
def test_a_late_rank_is_named_with_its_phase(
    ranks: Any, world_size: int, rank: int, place: str, options: dict[str, Any]
) -> None:
    """It is the only finding, and at least 80% of its delay counts for the right phase.

    Other programs may delay it further. How much of which delay counts is tested in `test_lateness.py`.
    """
    delay = Delay(rank, place, DELAY_S)
    outcomes: list[Outcome] = ranks(world_size).run(
        train, delay, WARM_UP_STEPS + WINDOW_STEPS, WINDOW_STEPS, options
    )
    phase = PHASES[PLACES.index(place)]
    assert [finding.subject for finding in outcomes[0].found] == [f"rank {rank} {phase}"]
    (late,) = outcomes[0].late
    assert (late.rank, late.phase) == (rank, phase)
    assert late.phases_ns[PLACES.index(place)] >= 0.8e9 * outcomes[rank].slept_s


def test_an_even_fleet_is_silent(ranks: Any) -> None:
    """Also beside other programs, which may take a core from one rank for a while, but not from the same always."""
    outcomes = ranks(3).run(train, Delay(None, "forward", 0.06), 60, 60 - WARM_UP_STEPS)
    assert outcomes[0].found == []


# ------------------------------------------------------------------ docs/slow_rank.md

WORLD_SIZES, DELAYS_MS = (2, 3, 4), (20, 60, 200)
SHOWN = blocks((DOCS / "slow_rank.md").read_text())


def test_the_sentence_on_the_page_names_the_late_rank() -> None:
    pattern = r"```text\nRank 2 is late: 4\d\.\d ms in each step, 4\d\.\d ms of it between steps\. .*\n```\n"
    assert re.fullmatch(pattern, SHOWN['played("between")'])


def test_at_least_80_percent_of_each_delay_on_the_page_is_found() -> None:
    rows = [line.split() for line in SHOWN["matrix()"].splitlines()[2:-1]]
    assert [(int(row[0]), int(row[1])) for row in rows] == [(n, ms) for n in WORLD_SIZES for ms in DELAYS_MS]
    for row in rows:
        assert len(row) == 3 + 4
        assert all(80 <= int(cell.removesuffix("%")) <= 120 for cell in row[3:]), row
