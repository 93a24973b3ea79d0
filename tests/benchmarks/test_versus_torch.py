"""The benchmark end to end on two real ranks, small enough for a test, and the arithmetic of its report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import contestants, machine, versus_torch
from benchmarks.contestants import FLOOR
from benchmarks.race import Raced
from benchmarks.versus_torch import Config


def test_two_ranks_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = Config(
        workloads=("transformer", "embedding_sparse"),
        settings=("default", "views"),
        size="smoke",
        out=tmp_path,
        timeout_s=240,
    )
    versus_torch.main(config)
    report = json.loads((tmp_path / "versus_torch.json").read_text())
    result = report["workloads"]["transformer"]
    assert list(result["contestants"]) == [
        "torch default",
        "minddp default",
        "minddp default, shared memory",
        "minddp default, auto",
        "torch views",
        "minddp views",
        "minddp views, shared memory",
        "torch default, backend minddp",
        "torch fully_shard",
        "torch fully_shard, backend minddp",
        "torch zero",
    ]
    assert {len(rounds) for rounds in result["rounds_ms"].values()} == {2}, "warm-up rounds are not counted"
    assert all(contestant["same_bits"] for contestant in result["contestants"].values())
    assert "torch zero" not in report["workloads"]["embedding_sparse"]["contestants"]
    printed = capsys.readouterr().out
    assert "minddp views, shared memory" in printed
    assert "all weights equal to the bit" in " ".join(printed.split())  # however it was wrapped
    as_they_come, over_minddp, *of_workloads = versus_torch.tables(report)
    titles = [of["title"] for of in report["workloads"].values()]
    assert [[row[0] for row in table.rows] for table in (as_they_come, over_minddp)] == [titles, titles]
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


def test_on_a_gpu_models_are_larger_and_transports_are_those_of_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(machine, "cupy_version", lambda: "14.2")
    config = Config(device="cuda").resolved()
    assert (config.world_size, config.workload_size) == (3, "gpu")
    assert config.transports == ("process_group", "nccl")
    monkeypatch.setattr(machine, "cupy_version", lambda: "none: not installed")
    assert Config(device="cuda").resolved().transports == ("process_group",)
    assert Config().resolved().transports == ("process_group", "shared_memory", "auto")


def test_settings_that_torch_does_not_know_are_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contestants, "supported", lambda settings: tuple(of for of in settings if of != "batched"))
    assert Config().resolved().settings == ("default", "views", "static", "views_static")


@pytest.mark.parametrize(
    "wrong",
    [
        {"rounds": 1},
        {"settings": ()},
        {"others": ("zero",), "settings": ("views",)},
    ],
)
def test_a_configuration_that_times_nothing_is_refused(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong)).rstrip("s")):
        Config(**wrong)


def test_the_figures_of_a_contestant(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Raced, "same_bits", lambda raced, contestant: True)
    seconds = {FLOOR: [0.4] * 4, "torch default": [1.0, 2.0, 1.0, 1.0], "minddp default": [1.1, 2.2, 1.1, 1.1]}
    raced = Raced("x", {}, {name: np.array(of) for name, of in seconds.items()}, seed=0)
    _, ours = contestants.pairs(["default"], ["process_group"])
    figured = raced.figures(ours)
    assert figured["baseline"] == "torch default"
    assert figured["ratio"].median == pytest.approx(1.1)
    assert figured["median_ms"] == pytest.approx(1100)
    assert figured["exposed_ms"].median == pytest.approx(700), "beyond the step without a wrapper"
    assert figured["exposed_ratio"].median == pytest.approx(0.7 / 0.6)
