"""The benchmark end to end on two real ranks, small enough for a test, and the arithmetic of its report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from benchmarks import contestants, results, tables, versus_torch
from benchmarks.contestants import FLOOR
from benchmarks.display import console_of
from benchmarks.versus_torch import Config, trained_alike
from tests.ranks import RankPool

ESTIMATE = {"median": float, "low": float, "high": float, "spread": float, "rounds": int}
CONTESTANT = {
    "baseline": str,
    "median_ms": float,
    "median_cpu_ms": float,
    "examples_per_s": float,
    "ratio": ESTIMATE,
    "cpu_ratio": ESTIMATE,
    "exposed_ms": ESTIMATE,
    "over_floor": ESTIMATE,
    "speedup": ESTIMATE,
    "efficiency": float,
    "same_bits": bool,
}
WORKLOAD = {
    "title": str,
    "tensors": int,
    "parameters": int,
    "gradient_mib": float,
    "examples_per_step": int,
    "rounds": int,
    "floors": {
        "one_rank_alone_ms": float,
        "no_wrapper_ms": float,
        "all_reduce_ms": {"process_group": float, "shared_memory": float},
        "floor_ms": {"process_group": float, "shared_memory": float},
    },
    "contestants": {str: CONTESTANT},
    "best": {str: {"torch": str, "minddp": str, "ratio": ESTIMATE}},
    "rounds_ms": {str: list},
    "rounds_cpu_ms": {str: list},
}
REPORT = {
    "question": str,
    "seat": str,
    "machine": {
        "cpu": str,
        "cores": float,
        "memory_gib": float,
        "os": str,
        "python": str,
        "torch": str,
        "load_average_before": float,
    },
    "config": {str: object},
    "peak_memory_mib": float,
    "barrier_us": ESTIMATE,
    "workloads": {str: WORKLOAD},
    "across_workloads": {str: {"median": float, "worst": float}},
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
        others=("replicate", "flat"),
        size="smoke",
        out=out,
        timeout_s=90,
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
        "reference flat",
    ]
    assert {len(rounds) for rounds in result["rounds_ms"].values()} == {2}, "warm-up rounds are not counted"
    assert all(contestant["same_bits"] for contestant in result["contestants"].values())
    assert "reference flat" not in report["workloads"]["embedding_sparse"]["contestants"]
    assert str(tmp_path) not in out.read_text()
    printed = capsys.readouterr().out
    assert "minddp views, shared memory" in printed
    assert "minddp default, auto * " in printed
    assert "* as it comes" in printed
    assert "all weights equal to the bit" in " ".join(printed.split())  # however it was wrapped
    written = tables.write(out.parent).read_text()
    assert "| transformer, 1 layers of 16 | views |" in written
    as_they_come, _, at_equal_settings = written.partition("### At equal settings")
    assert as_they_come.count("| transformer, 1 layers of 16 | 2 |") == 1
    assert at_equal_settings


def _compare_bits(rank: int, changed_rank: int) -> bool:
    torch.manual_seed(0)
    pair = contestants.pairs(["default"], ["process_group"], control=True)
    models = contestants.enter([contestants.Contestant(FLOOR, "floors"), *pair], nn.Linear(3, 3))
    if rank == changed_rank:
        with torch.no_grad():
            next(models["minddp default"].parameters()).add_(1e-3)
    return trained_alike(models, pair[1])


@pytest.mark.parametrize(("changed_rank", "equal"), [(-1, True), (0, False), (1, False)])
def test_a_difference_on_one_rank_is_seen_on_all(ranks: Callable[[int], RankPool], changed_rank: int, equal: bool):
    assert ranks(2).run(_compare_bits, changed_rank) == [equal, equal]


# ------------------------------------------------------------------ configuration


def test_where_results_go():
    assert Config().resolved().out == results.DIRECTORY / "versus_torch.json"
    assert Config(control=True).resolved().out == results.DIRECTORY / "versus_torch_control.json"
    for size in ("quick", "smoke"):
        assert Config(size=size).resolved().out is None, "a look does not overwrite a measurement"
        assert Config(size=size, out=Path("x.json")).resolved().out == Path("x.json")


def test_quick_takes_fewer_rounds_settings_and_others():
    quick = Config(size="quick").resolved()
    assert quick.rounds < Config().rounds
    assert quick.race_rounds.timed(round_s=1e-3) == quick.rounds, "short steps have no more of them"
    assert quick.settings == ("default", "views_static")
    assert quick.others == ()
    assert Config(size="quick", settings=("batched",)).resolved().settings == ("batched",)


def test_transports_are_those_that_the_device_has():
    assert Config().resolved().transports == ("process_group", "shared_memory", "auto")
    assert Config(device="cuda").resolved().transports == ("process_group",)
    assert Config(control=True).resolved().transports == ("process_group",), "torch has no other"
    assert Config(transports=("auto",)).resolved().transports == ("auto",)


def test_who_is_not_there_is_left_out_aloud(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(contestants, "unknown_to_torch", lambda settings: ["batched"])
    monkeypatch.setattr(contestants, "not_installed", lambda others: ["zero1"])
    config = versus_torch.without_absentees(Config(), Console())
    assert config.settings == ("default", "views", "static", "views_static")
    assert "zero1" not in config.others
    printed = capsys.readouterr().out
    assert "batched" in printed
    assert "DeepSpeed is not installed" in printed


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


def test_tables_keep_their_columns_where_nobody_looks():
    assert console_of().width >= 128
