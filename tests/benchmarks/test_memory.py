"""Memory and copies, end to end on two ranks: figures that follow from what each wrapper is known to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import memory
from benchmarks.contestants import FLOOR
from benchmarks.display import console_of
from benchmarks.memory import MIB, Config, Count, summarise
from benchmarks.workloads import workload
from tests.ranks import RankPool


def test_two_ranks_end_to_end(ranks: Callable[[int], RankPool], capsys: pytest.CaptureFixture[str]):
    config = Config(("wide_mlp",), tiny=True)
    report, _ = ranks(2).run(memory.count_workloads, config, ["default", "views"], ["flat"])
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
    console_of().print(memory.table(report["workloads"]["wide_mlp"]))
    assert "minddp views, shared memory" in capsys.readouterr().out


def test_the_step_without_a_wrapper_is_taken_off():
    task = workload("wide_mlp", tiny=True)
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
