"""A model of the user's own: found, checked, raced, and refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import growth, scaling, versus_torch
from benchmarks.own_model import own_workload
from benchmarks.question import ModelError
from tests.processes import ROOT, python
from tests.ranks import RankPool, on_ranks

SOURCE = """
import torch
from torch import nn

def make(parts=1):
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    batch = torch.randn(12 // parts, 8)
    return model, lambda model: model(batch).square().mean()

def number():
    return 3

def vector():
    model, loss = make()
    return model, lambda model: model(torch.ones(4, 8))

def not_finite():
    model, loss = make()
    return model, lambda model: loss(model) * float("nan")

def other():
    model, loss = make()
    return model, lambda copy: loss(model)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(SOURCE)
    return tmp_path


@on_ranks(1)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("toy.py:number", "returned a int; return "),
        ("toy.py:vector", "returned a Tensor; return one number"),
        ("toy.py:not_finite", "is nan at the first step"),
        ("toy.py:other", "gives no parameter a gradient: compute it from its argument"),
        ("toy.py:missing", "cannot be imported: .*missing"),
        ("no.py:make", "There is no file"),
        ("no_such_package:make", "cannot be imported"),
        ("make", "cannot be imported"),
    ],
)
def test_what_cannot_be_trained_is_refused(rank: int, folder: Path, name: str, reason: str) -> None:
    spec = f"{folder}/{name}" if name.partition(":")[0].endswith(".py") else name
    with pytest.raises(ModelError, match=reason):
        own_workload(spec)


def _batches(rank: int, spec: str, parts: int) -> tuple[int, float]:
    seen: list[torch.Tensor] = []

    class Looks(nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            seen.append(batch)
            return batch

    loss = own_workload(spec, parts).own_loss
    assert loss is not None
    loss(Looks())
    return len(seen[0]), seen[0].sum().item()


def test_each_rank_has_a_batch_of_its_own_or_a_part_of_it(ranks: Callable[[int], RankPool], folder: Path):
    (count, first), (_, second) = ranks(2).run(_batches, f"{folder}/toy.py:make", 1)
    assert count == 12
    assert first != second
    assert [count for count, _ in ranks(2).run(_batches, f"{folder}/toy.py:make", 3)] == [4, 4]


@pytest.mark.slow
def test_a_model_of_ones_own_is_compared_and_written_to_a_folder(folder: Path):
    out, spec = folder / "new" / "out", f"{folder}/toy.py:make"
    config = versus_torch.Config(
        model=spec, settings=("default",), transports=("auto",), others=("zero",), size="smoke", out=out
    )
    versus_torch.main(config)
    report = json.loads((out / "versus_torch.json").read_text())
    [(title, result)] = report["workloads"].items()
    assert title == "toy.py:make"
    assert result["tensors"] == 6
    assert all(of["same_bits"] for of in result["contestants"].values())
    assert "minddp default, auto" in (out / "versus_torch.md").read_text()
    assert str(folder) not in (out / "versus_torch.json").read_text().replace(spec, "")


@pytest.mark.slow
def test_scaling_is_weak_and_strong(folder: Path):
    config = scaling.Config(model=f"{folder}/toy.py:make", ranks=(1, 3), size="smoke", out=folder / "out")
    scaling.main(config)
    report = json.loads((folder / "out" / "scaling.json").read_text())
    kinds = report["kinds"]
    wrappers = ["torch default", "minddp default", "minddp default, auto"]
    names = ["no wrapper", *wrappers]
    assert {kind: list(by_name) for kind, by_name in kinds.items()} == {"weak": names, "strong": names}
    assert [list(kinds[kind]["torch default"]) for kind in kinds] == [["1", "3"], ["3"]]
    for by_name in kinds.values():
        one, three = (by_name["no wrapper"].get(number) for number in ("1", "3"))
        assert three["speedup"]["median"] > 0
        assert one is None or one["speedup"]["median"] == 1.0
    assert [len(table.rows) for table in scaling.tables(report)] == [8, 4]


@pytest.mark.slow
def test_growth_along_every_axis(tmp_path: Path):
    growth.main(growth.Config(size="smoke", tensors=(100,), elements=(100_000,), ranks=(2,), out=tmp_path))
    report = json.loads((tmp_path / "growth.json").read_text())
    assert {axis: list(points) for axis, points in report["axes"].items()} == {
        "tensors": ["100"],
        "elements": ["100000"],
        "ranks": ["2"],
        "memory": ["100000"],
    }
    for points in report["axes"].values():
        for of in points.values():
            assert list(of) == ["torch default", "minddp default", "minddp default, auto"]
            assert of["torch default"]["ratio"]["median"] == 1
    assert len(list(growth.tables(report))) == 4


@pytest.mark.slow
def test_ranks_that_torchrun_has_started_race(folder: Path):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "minddp", "bench", "versus_torch", "--model", "toy.py:make"]
    command += ["--size", "smoke", "--out", "out"]
    command += ["--settings", "default", "--transport", "process_group", "--others", "zero"]
    printed = python(*command, cwd=folder, PYTHONPATH=str(ROOT))
    assert json.loads((folder / "out" / "versus_torch.json").read_text())["config"]["world_size"] == 2
    assert printed.count("Written:") == 1


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        (lambda: scaling.Config(ranks=()), "ranks is"),
        (lambda: scaling.Config(ranks=(0, 2)), "ranks is"),
        (lambda: growth.Config(ranks=(0, 2)), "ranks is"),
        (lambda: growth.Config(tensors=(3,)), "tensors and elements must be"),
    ],
)
def test_a_configuration_without_ranks_is_refused(config: Callable[[], object], wrong: str):
    with pytest.raises(ValueError, match=wrong):
        config()
