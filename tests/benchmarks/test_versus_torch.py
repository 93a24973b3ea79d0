"""The benchmark end to end on two real ranks, small enough for a test, and the arithmetic of its report."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from benchmarks import contestants, versus_torch
from benchmarks.contestants import FLOOR, WAITING, LadderName
from benchmarks.race import Raced
from benchmarks.versus_torch import Config, figures, floor_of, floors, split_of

ESTIMATE = {"median": float, "low": float, "high": float, "spread": float, "rounds": int}
CONTESTANT = {
    "baseline": str,
    "median_ms": float,
    "median_cpu_ms": float,
    "ratio": ESTIMATE,
    "cpu_ratio": ESTIMATE,
    "exposed_ms": ESTIMATE,
    "over_floor": ESTIMATE,
    "same_bits": bool,
}
WORKLOAD = {
    "title": str,
    "tensors": int,
    "parameters": int,
    "gradient_mib": float,
    "rounds": int,
    "split": {str: {str: ESTIMATE}},
    "floors": {
        "no_wrapper_ms": float,
        "all_reduce_ms": {"process_group": float, "shared_memory": float},
        "floor_ms": {"process_group": float, "shared_memory": float},
    },
    "contestants": {str: CONTESTANT},
    "rounds_ms": {str: list},
    "rounds_cpu_ms": {str: list},
}
REPORT = {
    "question": str,
    "machine": {
        "cpu": str,
        "cores": float,
        "memory_gib": float,
        "os": str,
        "python": str,
        "torch": str,
        "load_average_before": float,
        "load_average_after": float,
    },
    "config": {str: object},
    "workloads": {str: WORKLOAD},
}


def _assert_schema(value: object, schema: object, path: str = "report") -> None:
    """`schema` is a type, or a dict from keys (or `str`, for any key) to schemas."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), path
        assert value, f"{path} is empty"
        if set(schema) != {str}:
            assert set(value) == set(schema), path
        for key, item in value.items():
            _assert_schema(item, schema.get(key, schema.get(str)), f"{path}.{key}")
    else:
        assert isinstance(value, schema), f"{path} is {value!r}"  # type: ignore[arg-type]


def test_two_ranks_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "new folder" / "versus_torch.json"
    config = Config(
        workloads=("transformer", "embedding_sparse"),
        settings=("default", "views"),
        others=("replicate", "fully_shard", "zero", "flat"),
        size="smoke",
        out=out,
        timeout_s=240,
    )
    versus_torch.main(config)
    report = json.loads(out.read_text())
    _assert_schema(report, REPORT)
    result = report["workloads"]["transformer"]
    assert list(result["contestants"]) == [
        "torch default",
        "minddp default",
        "minddp default, shared memory",
        "minddp default, auto",
        "torch views",
        "minddp views",
        "minddp views, shared memory",
        "torch replicate",
        "torch fully_shard",
        "torch ZeroRedundancyOptimizer",
        "reference flat",
    ]
    assert {len(rounds) for rounds in result["rounds_ms"].values()} == {2}, "warm-up rounds are not counted"
    assert all(contestant["same_bits"] for contestant in result["contestants"].values())
    transports = ("process_group", "shared_memory", "auto")
    assert list(result["split"]) == ["torch default", *(contestants.candidate("default", of) for of in transports)]
    assert "reference flat" not in report["workloads"]["embedding_sparse"]["contestants"]
    printed = capsys.readouterr().out
    assert "minddp views, shared memory" in printed
    assert "all weights equal to the bit" in " ".join(printed.split())  # however it was wrapped
    as_they_come, *of_workloads = versus_torch.tables(report)
    of_workloads = [table for table in of_workloads if "beyond no wrapper" not in table.title]
    assert [row[0] for row in as_they_come.rows] == [of["title"] for of in report["workloads"].values()]
    assert [len(table.rows) for table in of_workloads] == [
        len(of["contestants"]) for of in report["workloads"].values()
    ]


# ------------------------------------------------------------------ configuration


def test_the_control_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    monkeypatch.setattr(versus_torch, "ask", lambda name, *_, **__: asked.append(name))
    versus_torch.main(Config())
    versus_torch.main(Config(control=True))
    assert asked == ["versus_torch", "versus_torch_control"]


def test_quick_takes_fewer_rounds_and_settings_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(importlib, "import_module", _is_missing)
    quick = Config(size="quick").resolved()
    assert quick.race_rounds.least < Config().rounds
    assert quick.race_rounds.timed(round_s=1e-3) == quick.race_rounds.least, "short steps have no more of them"
    assert quick.settings == ("default", "views_static")
    assert quick.others == ("replicate", "fully_shard", "zero", *get_args(LadderName))
    said = capsys.readouterr().out
    assert "without the settings views, static, batched" in said
    assert all(f"Left out: {name}, because" in said for name in ("torchft", "deepspeed_1", "deepspeed_2"))
    assert Config(size="quick", settings=("batched",)).resolved().settings == ("batched",)
    assert Config().race_rounds.timed(round_s=1e-1) > Config().rounds


def _is_missing(name: str) -> None:
    raise ImportError(f"No module named {name!r}")


def test_transports_are_those_that_the_device_has():
    assert Config().resolved().transports == ("process_group", "shared_memory", "auto")
    assert Config(device="cuda").resolved().transports == ("process_group",)
    assert Config(control=True).resolved().transports == ("process_group",), "torch has no other"
    assert Config(transports=("auto",)).resolved().transports == ("auto",)


def test_settings_that_torch_does_not_know_are_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contestants, "supported", lambda settings: tuple(of for of in settings if of != "batched"))
    assert Config().resolved().settings == ("default", "views", "static", "views_static")


@pytest.mark.parametrize(
    "wrong",
    [
        {"rounds": 1},
        {"warmup_rounds": 0},
        {"world_size": 0},
        {"threads": 0},
        {"steps_per_turn": 0},
        {"settings": ()},
    ],
)
def test_a_configuration_that_times_nothing_is_refused(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong)).rstrip("s")):
        Config(**wrong)


# ------------------------------------------------------------------ arithmetic, from invented seconds

TRANSPORTS = ["process_group", "shared_memory"]
FIELD = [*contestants.floors(TRANSPORTS), *contestants.pairs(["default", "views"], TRANSPORTS)]
SECONDS = {
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


def test_the_figures_of_a_contestant(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Raced, "same_bits", lambda raced, contestant: True)
    raced = Raced("x", {}, WALL, CPU, seed=0)
    figured = figures(_of("minddp default"), raced)
    assert figured["baseline"] == "torch default"
    assert figured["ratio"].median == pytest.approx(1.1)
    assert figured["median_ms"] == pytest.approx(1100)
    assert figured["exposed_ms"].median == pytest.approx(700), "beyond the step without a wrapper"
    assert figured["over_floor"].median == pytest.approx(1.1 / 0.6), "the wire takes longer than computing"


def test_the_floor_is_the_longer_of_computing_and_the_wire():
    assert floor_of(WALL, "process_group").tolist() == [0.6] * 4
    assert floor_of(WALL, "shared_memory").tolist() == [0.4] * 4
    assert floor_of(WALL, "auto").tolist() == [0.4] * 4, "whichever it has chosen"
    assert floors(WALL)["floor_ms"] == pytest.approx({"process_group": 600, "shared_memory": 400})


def test_the_parts_of_the_overhead_add_up():
    seconds = {FLOOR: 1.0, WAITING: 1.2, "x": 5.0, "x, no buffers": 4.5, "x, nothing sent": 2.5, "x, hooks": 1.5}
    wall = {name: np.full(4, of) for name, of in seconds.items()} | {"torch default": np.full(4, 9.0)}
    split = {part: of.median for part, of in split_of("x", Raced("", {}, wall, wall, seed=0)).items()}
    assert split.pop("of_torch") == pytest.approx(0.5)
    assert split == pytest.approx(
        {"overhead": 4000, "waiting": 200, "hooks": 500, "copies": 1000, "wire": 1800, "buffers": 500}
    )
