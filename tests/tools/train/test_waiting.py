"""Who waits for which rank, in the records and the progress line of `minddp train`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from torch import nn

from minddp.tools.forecast.lateness import LateRank
from minddp.tools.train.metrics import training_line, waiting
from minddp.tools.train.settings import Settings
from minddp.tools.watchdog import comparison, slow_rank
from minddp.tools.watchdog.slow_rank import SlowRank, Window
from tests.tools.train.runs import tiny, train_here

MS = 1_000_000
LATE = LateRank(1, 8.0 * MS, (0, 8.0 * MS, 0, 0, 0), 0.3)
SHORT = partial(Window, steps=5, seconds=0, in_a_row=1, lasts_s=0)


def wrapper_that_has_seen(waited_ns: float | None, *late: LateRank) -> nn.Module:
    check = SlowRank()
    check.waited_ns, check.late = waited_ns, [*late]
    return cast(nn.Module, SimpleNamespace(guard=SimpleNamespace(checks={"slow_rank": check})))


def test_fields_of_a_record() -> None:
    assert waiting(wrapper_that_has_seen(3.0 * MS)) == {"waited_ms": 3.0}
    assert waiting(wrapper_that_has_seen(3.0 * MS, LATE)) == {
        "waited_ms": 3.0,
        "late_rank": 1,
        "late_phase": "in forward",
        "late_ms": 8.0,
    }


def test_where_nothing_is_known_there_are_no_fields() -> None:
    assert waiting(wrapper_that_has_seen(None)) == {}
    assert waiting(cast(nn.Module, SimpleNamespace(guard=SimpleNamespace(checks={})))) == {}
    assert waiting(cast(nn.Module, SimpleNamespace(guard=None))) == {}
    assert waiting(nn.Linear(1, 1)) == {}  # as torch's wrapper


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "  1,000 tokens/s  300 MiB  0.5 TFLOP/s"),
        ({"data_share": 0.25}, "TFLOP/s  waits 25% for data"),
        ({"waited_ms": 3.0}, "TFLOP/s  waits 3.0 ms a step for gradients"),
        ({"loss_scale": 1024.0}, "TFLOP/s  loss scale 1024"),
        (
            {"waited_ms": 3.0, "late_rank": 1, "late_phase": "in forward", "late_ms": 8.0},
            "TFLOP/s  waits 3.0 ms a step for gradients, for rank 1: 8.0 ms in forward",
        ),
    ],
)
def test_the_progress_line(fields: dict[str, Any], end: str) -> None:
    record = {"step": 10, "loss": 2.5, "learning_rate": 1e-3, "targets_per_s": 1000.0}
    record |= {"memory_mib": 300, "tflops_per_s": 0.5, "data_share": 0.0, **fields}
    assert training_line(record, 0.5, "tokens").endswith(end)


def train_with_short_windows(rank: int, settings: Settings) -> None:
    with mock.patch.object(slow_rank, "Window", SHORT), mock.patch.object(comparison, "EVERY_S", 0.02):
        train_here(rank, settings)


def test_a_run_records_how_long_ranks_wait(ranks, tmp_path: Path) -> None:
    settings = tiny(tmp_path, steps=80)
    ranks(2).run(train_with_short_windows, settings)
    records = [json.loads(line) for line in (settings.folder / "metrics.jsonl").read_text().splitlines()]
    waited_ms = [record["waited_ms"] for record in records if "waited_ms" in record]
    assert waited_ms
    assert all(ms > 0 for ms in waited_ms)
