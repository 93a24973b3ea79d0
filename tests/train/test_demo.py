from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from minddp.train.compare import Comparison, Contestant, compare, differences, digest
from minddp.train.demo import DemoSettings, describe_bits, sparkline, summarize
from minddp.train.settings import Settings, SettingsError
from tests.train.runs import TINY_GPT, tiny, train_here, world_here


def comparison(**changes: object) -> Comparison:
    fields = {
        "steps": 8,
        "ranks": 2,
        "parameters": 1000,
        "differences": [],
        "step_ms": {"torch": [10.0, 20.0, 30.0], "minddp": [9.0, 20.0, 36.0]},
        "targets_per_step": 100,
        "plan": "bucket 0",
    }
    return Comparison(**{**fields, **changes})  # type: ignore[arg-type]


def test_figures_of_a_comparison(tmp_path: Path) -> None:
    found = comparison()
    assert found.ratio == 1.0  # median of 0.9, 1.0, 1.2: of pairs, not of medians
    assert found.median_ms("minddp") == 20.0
    assert found.targets_per_s("torch") == 5000
    found.save(tmp_path / "compare.json")
    assert Comparison.load(tmp_path / "compare.json") == found


def _compare(rank: int, settings: Settings) -> Comparison:
    return compare(settings, world_here(rank), turns=3, steps_per_turn=2)


def test_torch_and_minddp_take_the_same_steps(ranks, tmp_path: Path) -> None:
    settings = tiny(tmp_path, gpt=dataclasses.replace(TINY_GPT, dropout=0.0))
    for found in ranks(2).run(_compare, settings):
        assert found.differences == []
        assert found.steps == 6
        assert {wrapper: len(times) for wrapper, times in found.step_ms.items()} == {"torch": 2, "minddp": 2}
        assert found.plan


def _tamper(rank: int, settings: Settings) -> list[list[str]]:
    """The comparison of two equal contestants; after one bit of one has been flipped; after they have diverged."""
    one, other = (Contestant(settings, world_here(rank)) for _ in range(2))
    for contestant in (one, other):
        torch.manual_seed(0)
        contestant.take_turn(2)
    found = [differences(one, other)]
    weight = other.trainer.model.head.weight.data
    weight.view(torch.int32)[0, 0] ^= 1
    found.append(differences(one, other))
    weight.add_(rank)  # nothing on rank 0
    for contestant in (one, other):
        contestant.take_turn(1)
    return [*found, differences(one, other)]


def test_one_bit_in_one_weight_is_found(ranks, tmp_path: Path) -> None:
    settings = tiny(tmp_path, ddp="torch", gpt=dataclasses.replace(TINY_GPT, dropout=0.0))
    for nothing, flipped, parted in ranks(2).run(_tamper, settings):
        assert nothing == []
        assert flipped == ["head.weight after the last step"]
        assert "embedding.weight after the last step" in parted


def test_a_digest_sees_bits() -> None:
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    assert digest(torch.tensor([1.0, 2.0])) == digest(torch.tensor([[1.0, 9.0], [2.0, 9.0]])[:, 0])


@pytest.fixture
def finished(ranks, tmp_path: Path) -> Path:
    """The folder of a demo whose two parts have run."""
    ranks(2).run(train_here, tiny(tmp_path, ddp="torch"))
    comparison().save(tmp_path / "compare.json")
    return tmp_path


def test_the_summary_shows_everything_and_its_status_is_the_verdict(finished: Path) -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    assert summarize(DemoSettings(out=finished, target=6.0), console) == 0
    shown = console.export_text()
    for expected in ("5.545 ->", "below the target of 6.0", "yes, 8 steps", "20.0 ms", "bucket 0", "def "):
        assert expected in shown
    assert summarize(DemoSettings(out=finished, target=0.1), console) == 1
    assert "MISSED the target" in console.export_text()
    comparison(differences=["rank 1: head.weight"]).save(finished / "compare.json")
    assert summarize(DemoSettings(out=finished, target=6.0), console) == 1
    assert "NO: rank 1: head.weight" in console.export_text()


@pytest.mark.parametrize("changes", [{"minutes": 0.0}, {"turns": 1}])
def test_a_demo_that_cannot_work(changes: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match="must be"):
        DemoSettings(**changes)  # type: ignore[arg-type]


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert len(sparkline([float(i) for i in range(1000)])) == 48


def test_differences_are_named() -> None:
    assert "loss of step 3" in str(describe_bits(comparison(differences=["rank 0: the loss of step 3"])))
    assert str(describe_bits(comparison())).startswith("yes, 8 steps")
