"""What questions share: options that are checked, and ranks that are asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console

from benchmarks.question import RaceOptions, ask, report_of


@dataclass(frozen=True, kw_only=True)
class Config(RaceOptions):
    LEAST = RaceOptions.LEAST | {"world_size": 2}

    answer: int = 42


def _answer(rank: int, config: Config) -> dict[str, Any]:
    return report_of("what is it?", config, answers=[config.answer, rank, dist.get_world_size()])


def test_ranks_are_asked_and_the_first_ones_report_is_shown_and_kept(tmp_path: Path):
    shown: list[Mapping[str, Any]] = []

    def show(report: Mapping[str, Any], console: Console) -> None:
        shown.append(report)

    out = tmp_path / "x.json"
    ask("x", _answer, Config(out=out, timeout_s=60, rounds=3), show)
    kept = json.loads(out.read_text())
    assert shown == [kept]
    assert (kept["question"], kept["answers"]) == ("what is it?", [42, 0, 2])
    assert kept["config"]["rounds"] == 3
    assert "out" not in kept["config"], "paths are nobody else's business"
    assert {"cpu", "torch", "load_average"} <= set(kept["machine"])


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"warmup_rounds": 0}, {"threads": 0}, {"world_size": 1}])
def test_options_below_what_they_must_be_are_refused(wrong: dict[str, int]):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .; it must be at least"):
        Config(**wrong)


def test_rounds_are_those_of_the_options():
    rounds = Config(rounds=5, warmup_rounds=3, seed=7).race_rounds
    assert (rounds.least, rounds.warmup, rounds.seed) == (5, 3, 7)
    assert rounds.timed(round_s=1e-9) == 5
