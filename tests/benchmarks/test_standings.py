"""What is said of contestants, from invented seconds."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import contestants
from benchmarks.contestants import ALONE, FLOOR
from benchmarks.standings import Setup, across_workloads, best, figures, floor_of, floors

FIELD = contestants.field(["default", "views"], ["process_group", "shared_memory"])
SECONDS = {
    ALONE: [0.3, 0.3, 0.3, 0.3],
    FLOOR: [0.4, 0.4, 0.4, 0.4],
    "all-reduce only, process group": [0.6, 0.6, 0.6, 0.6],
    "all-reduce only, shared memory": [0.1, 0.1, 0.1, 0.1],
    "torch default": [1.0, 2.0, 1.0, 1.0],
    "minddp default": [1.1, 2.2, 1.1, 1.1],
    "minddp default, shared memory": [0.5, 1.0, 0.5, 0.5],
    "torch views": [0.8, 1.6, 0.8, 0.8],
    "minddp views": [0.7, 2.4, 0.7, 1.2],
    "minddp views, shared memory": [0.9, 0.4, 0.9, 0.2],
}
WALL = {name: np.array(seconds) for name, seconds in SECONDS.items()}
CPU = {name: np.ones(4) for name in SECONDS}


def _of(name: str) -> contestants.Contestant:
    return next(c for c in FIELD if c.name == name)


def test_the_figures_of_a_contestant():
    figured = figures(_of("minddp default"), WALL, CPU, Setup(world_size=2, examples=16, seed=0))
    assert figured["baseline"] == "torch default"
    assert figured["ratio"]["median"] == pytest.approx(1.1)
    assert figured["median_ms"] == pytest.approx(1100)
    assert figured["exposed_ms"]["median"] == pytest.approx(700), "beyond the step without a wrapper"
    assert figured["over_floor"]["median"] == pytest.approx(1.1 / 0.6), "the wire takes longer than computing"
    assert figured["speedup"]["median"] == pytest.approx(2 * 0.3 / 1.1)
    assert figured["efficiency"] == pytest.approx(0.3 / 1.1)
    assert figured["examples_per_s"] == pytest.approx(2 * 16 / 1.1)


def test_the_floor_is_the_longer_of_computing_and_the_wire():
    assert floor_of(WALL, "process_group").tolist() == [0.6] * 4
    assert floor_of(WALL, "shared_memory").tolist() == [0.4] * 4
    assert floor_of(WALL, "auto").tolist() == [0.4] * 4, "whichever it has chosen"
    assert floors(WALL)["floor_ms"] == pytest.approx({"process_group": 600, "shared_memory": 400})


def test_the_best_is_chosen_in_other_rounds_than_it_is_timed_in():
    found = best(FIELD, WALL, seed=0)
    # In rounds 0 and 2 minddp views is the fastest by the process group; in 1 and 3 it takes 1.5 times as long.
    assert (found["process_group"]["torch"], found["process_group"]["minddp"]) == ("torch views", "minddp views")
    assert found["process_group"]["ratio"]["median"] == pytest.approx(1.5)
    assert found["any"]["minddp"] == "minddp default, shared memory"


def test_across_workloads_reports_the_median_and_the_worst():
    timed = {
        str(i): {
            "contestants": {
                "minddp default": {"ratio": {"median": median}},
                "torch default": {"ratio": {"median": 1.0}},
            }
        }
        for i, median in enumerate([1.2, 0.9, 1.0])
    }
    assert across_workloads(timed) == {"minddp default": {"median": 1.0, "worst": 1.2}}
