"""Memory and copies, end to end on two ranks: figures that follow from what each wrapper is known to do."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks import memory
from benchmarks.accounting import Peak
from benchmarks.contestants import FLOOR, Contestant, Step
from benchmarks.memory import MIB, Config, Count, Stretch, count_once, peak_of, summarise
from benchmarks.workloads import Workload, workload
from minddp.transport.shared_memory import segments
from tests.ranks import RankPool


def test_two_ranks_end_to_end(ranks: Callable[[int], RankPool]):
    config = Config(workloads=("wide_mlp",), settings=("default", "views"), others=("flat",), size="smoke")
    report, _ = ranks(2).run(memory.count_workloads, config)
    counted = report["workloads"]["wide_mlp"]["contestants"]
    assert set(counted) == {
        "torch default",
        "minddp default",
        "minddp default, shared memory",
        "torch views",
        "minddp views",
        "minddp views, shared memory",
        "reference flat",
    }
    # Of every gradient: a copy into its bucket and one back, or with views only the first. `flat` divides, too.
    for name, copies in {"torch default": 2, "torch views": 1, "reference flat": 3}.items():
        assert counted[name]["copied"] == pytest.approx(copies, abs=0.1), name
    # A bucket beside the gradients, which with views are the bucket once it has been filled.
    for name in ("torch default", "minddp default", "minddp default, shared memory"):
        assert counted[name]["added"] > 0.9, name  # memory that an earlier one has left may serve again
    assert counted["torch views"]["added"] < counted["torch default"]["added"]
    (table,) = memory.tables(report)
    assert "minddp views, shared memory" in [row[0] for row in table.rows]
    assert table.caption.startswith("no wrapper: ")


def test_the_step_without_a_wrapper_is_subtracted():
    task = workload("wide_mlp", "tiny")
    model = task.model()
    size = sum(p.nbytes for p in model.parameters())
    counts = {FLOOR: Count(peak=3 * size, written=10 * size), "x": Count(peak=5 * size, written=11 * size)}
    result = summarise(task, model, counts)
    assert result["no_wrapper"] == {"peak_mib": 3 * size / MIB, "written_mib": 10 * size / MIB}
    assert result["contestants"] == {
        "x": {
            "peak_mib": 5 * size / MIB,
            "added_mib": 2 * size / MIB,
            "added": 2.0,
            "copied_mib": size / MIB,
            "copied": 1.0,
        }
    }


def test_each_stretch_stands_on_what_is_left_of_those_before():
    wrapping, stepping = Stretch(Peak(64, left=3), shared=0), Stretch(Peak(16, left=9), shared=20)
    assert peak_of(wrapping, stepping) == 64, "the buckets are made after the broadcast"
    assert peak_of(wrapping, Stretch(Peak(50), shared=20)) == 3 + 50 + 20


OWN, SHARED = 4 * MIB, 3 * MIB


def _wrapped_in_passing(model: nn.Module) -> nn.Module:
    torch.empty(OWN, dtype=torch.uint8)  # freed at once, as the message of a broadcast is
    return model


def _step_that_shares(model: nn.Module, task: Workload, rank: int) -> Step:
    segment = segments.attach(segments.create(SHARED), SHARED)
    shared = segments.tensor_over(segment, torch.uint8, SHARED)
    return lambda: shared.fill_(1)


def _peak_of_one_after_the_other(rank: int) -> int:
    contestant = Contestant("", "", wrap=_wrapped_in_passing, step=_step_that_shares)
    return count_once(contestant, nn.Linear(2, 2), workload("wide_mlp", "tiny"), rank).peak


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no anonymous files in memory here")
def test_memory_of_different_times_is_not_added_up(ranks: Callable[[int], RankPool]):
    for peak in ranks(2).run(_peak_of_one_after_the_other):
        assert peak == pytest.approx(OWN, rel=0.1)
