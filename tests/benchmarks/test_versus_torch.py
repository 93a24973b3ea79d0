"""The benchmark end to end on two real ranks, small enough for a test, and the arithmetic of its report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from benchmarks import contestants, versus_torch
from benchmarks.harness import Turn
from benchmarks.versus_torch import Config, across_workloads, equal_on_all_ranks, summarise
from tests.ranks import RankPool

RATIO = {"median": float, "low": float, "high": float, "spread": float, "rounds": int}


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


WORKLOAD = {
    "title": str,
    "tensors": int,
    "parameters": int,
    "gradient_mib": float,
    "median_ms": {str: float},
    "median_cpu_ms": {str: float},
    "ratios": {str: RATIO},
    "cpu_ratios": {str: RATIO},
    "same_bits": {str: bool},
    "best": {"torch": str, "minddp": str, "ratio": RATIO, "cpu_ratio": RATIO},
    "rounds_ms": {str: list},
    "rounds_cpu_ms": {str: list},
}

REPORT = {
    "question": str,
    "candidate": str,
    "machine": {
        "cpu": str,
        "cores": int,
        "memory_gib": float,
        "os": str,
        "python": str,
        "torch": str,
        "load_average_before": float,
    },
    "config": {str: object},
    "peak_memory_mib": float,
    "workloads": {str: WORKLOAD},
    "across_workloads": {str: {"median": float, "worst": float}},
}


def test_two_ranks_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "new folder" / "figures.json"
    versus_torch.main(
        Config(
            workloads=("many_small",),
            settings=("default", "views"),
            rounds=2,
            warmup_rounds=1,
            steps_per_turn=1,
            out=out,
            timeout_s=90,
        )
    )
    report = json.loads(out.read_text())
    _assert_schema(report, REPORT)
    result = report["workloads"]["many_small"]
    names = {"no wrapper", "torch default", "minddp default", "torch views", "minddp views"}
    assert set(result["median_ms"]) == set(result["rounds_ms"]) == set(result["rounds_cpu_ms"]) == names
    assert {len(rounds) for rounds in result["rounds_ms"].values()} == {2}, "warm-up rounds are not counted"
    assert result["same_bits"] == {"default": True, "views": True}
    assert str(tmp_path) not in out.read_text()
    printed = capsys.readouterr().out
    assert "200 linear layers of 64" in printed
    assert "best of each" in printed


def _turns(wall_ms: dict[str, list[float]]) -> dict[str, list[Turn]]:
    return {name: [Turn(ms / 1e3, ms / 2e3) for ms in rounds] for name, rounds in wall_ms.items()}


def test_the_summary_pairs_equal_settings_and_the_best_of_each():
    rank_0 = {
        "no wrapper": [1.0, 1.0, 1.0],
        "torch default": [10.0, 20.0, 10.0],
        "minddp default": [11.0, 22.0, 11.0],
        "torch views": [8.0, 16.0, 8.0],
        "minddp views": [6.0, 12.0, 6.0],
    }
    rank_1 = {name: [0.5] * 3 for name in rank_0}
    config = Config(settings=("default", "views"), rounds=3)
    result = summarise([_turns(rank_0), _turns(rank_1)], {"default": True, "views": False}, config)
    assert result["ratios"]["default"]["median"] == pytest.approx(1.1)
    assert result["ratios"]["views"]["median"] == pytest.approx(0.75)
    assert result["cpu_ratios"]["default"]["median"] == pytest.approx((11 + 0.5) / (10 + 0.5))
    assert result["best"]["torch"] == "torch views"
    assert result["best"]["minddp"] == "minddp views"
    assert result["median_ms"]["torch default"] == 10.0
    assert result["same_bits"] == {"default": True, "views": False}


def test_across_workloads_reports_the_median_and_the_worst():
    timed = {str(i): {"ratios": {"default": {"median": m}}} for i, m in enumerate([1.2, 0.9, 1.0])}
    assert across_workloads(timed) == {"default": {"median": 1.0, "worst": 1.2}}


def _compare_bits(rank: int, changed_rank: int) -> bool:
    torch.manual_seed(0)
    models = contestants.build(nn.Linear(3, 3), ["default"], control=True)
    if rank == changed_rank:
        with torch.no_grad():
            next(models["minddp default"].parameters()).add_(1e-3)
    return equal_on_all_ranks(models, "default")


@pytest.mark.parametrize(("changed_rank", "equal"), [(-1, True), (0, False), (1, False)])
def test_a_difference_on_one_rank_is_seen_on_all(ranks: Callable[[int], RankPool], changed_rank: int, equal: bool):
    assert ranks(2).run(_compare_bits, changed_rank) == [equal, equal]


def test_where_results_go():
    results = Path(versus_torch.__file__).parent / "results"
    assert Config().resolved().out == results / "versus_torch.json"
    assert Config(control=True).resolved().out == results / "versus_torch_control.json"
    assert Config(quick=True).resolved().out is None, "a look does not overwrite a measurement"
    assert Config(quick=True, out=Path("x.json")).resolved().out == Path("x.json")


def test_quick_takes_fewer_rounds_and_settings():
    quick = Config(quick=True).resolved()
    assert quick.rounds < Config().rounds
    assert quick.settings == ("default", "views_static")
    assert Config(quick=True, settings=("batched",)).resolved().settings == ("batched",)


def test_settings_that_torch_does_not_know_are_left_out_aloud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(contestants, "unknown_to_torch", lambda settings: ["batched"])
    config = versus_torch.without_unknown_settings(Config(), Console())
    assert config.settings == ("default", "views", "static", "views_static")
    assert "batched" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        {"rounds": 0},
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
