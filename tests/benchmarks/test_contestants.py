"""Both sides of a pair get the same options and the same weights, and everybody trains to them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP

import minddp
from benchmarks import contestants
from benchmarks.contestants import FLOOR, SETTINGS, OtherName, SettingName
from benchmarks.workloads import workload
from tests.ranks import RankPool

OTHERS = [name for name in get_args(OtherName) if name != "zero1"]


def test_every_setting_that_can_be_asked_for_has_options():
    assert get_args(SettingName) == tuple(SETTINGS)


def test_a_heat_is_torch_and_minddp_by_each_transport_at_one_setting():
    field = contestants.field(["default", "views"], ["process_group", "shared_memory", "auto"], ["flat"])
    assert contestants.heats(field) == [
        ["one rank alone", "no wrapper", "all-reduce only, process group", "all-reduce only, shared memory"],
        ["torch default", "minddp default", "minddp default, shared memory", "minddp default, auto"],
        ["torch views", "minddp views", "minddp views, shared memory"],
        ["reference flat"],
    ]
    baselines = {c.name: c.baseline for c in field}
    assert baselines["minddp views, shared memory"] == "torch views"
    assert baselines["reference flat"] == "torch default"
    assert baselines[FLOOR] is None


def _built(rank: int, control: bool) -> dict[str, tuple[type, float, bool]]:
    torch.manual_seed(rank)  # so that only the wrappers' own broadcast makes the ranks agree
    field = contestants.pairs(["default", "views"], ["process_group"], control=control)
    models = contestants.enter(field, nn.Linear(2, 2))
    assert len({id(p) for m in models.values() for p in m.parameters()}) == 2 * len(models)
    return {
        name: (type(m), next(m.parameters()).sum().item(), getattr(m, "gradient_as_bucket_view", False))
        for name, m in models.items()
    }


@pytest.mark.parametrize(("control", "seat"), [(False, minddp.DistributedDataParallel), (True, NativeDDP)])
def test_contestants_are_wrapped_copies_of_one_model(ranks: Callable[[int], RankPool], control: bool, seat: type):
    for built in ranks(2).run(_built, control):
        assert {name: kind for name, (kind, _, _) in built.items()} == {
            "torch default": NativeDDP,
            "torch views": NativeDDP,
            "minddp default": seat,
            "minddp views": seat,
        }
        assert len({total for _, total, _ in built.values()}) == 1
        assert [name for name, (_, _, views) in built.items() if views] == ["torch views", "minddp views"]


def _train(rank: int, others: list[str]) -> dict[str, list[Any]]:
    torch.manual_seed(0)
    task = workload("transformer", tiny=True)
    transports = ["process_group", "shared_memory", "auto"]
    field = contestants.field(["default", "views"], transports, others)
    models = contestants.enter(field, task.model())
    for contestant in field:
        step = contestant.step(models[contestant.name], task, rank)
        for _ in range(3):
            step()
    return {name: [p.detach().clone() for p in model.parameters()] for name, model in models.items()}


def test_everybody_trains_to_the_same_bits_and_the_floors_do_not(ranks: Callable[[int], RankPool]):
    first, second = ranks(2).run(_train, OTHERS)
    expected = first["torch default"]
    for weights in (first, second):
        for name, found in weights.items():
            is_floor = name in (FLOOR, "one rank alone") or "only" in name
            assert all(map(torch.equal, found, expected)) == (not is_floor), name
    alone = first["one rank alone"]
    assert all(map(torch.equal, alone, first[FLOOR])), "rank 0 trains"
    assert not any(map(torch.equal, second["one rank alone"], second[FLOOR])), "rank 1 sits still"


def test_who_cannot_send_sparse_gradients_stays_out_of_that_workload():
    field = contestants.field(["default"], ["process_group"], ["replicate", "naive", "zero1"])
    assert contestants.for_workload(field, workload("transformer", tiny=True)) == field
    left = contestants.for_workload(field, workload("embedding_sparse", tiny=True))
    assert [c.name for c in left if c.baseline] == ["torch default", "minddp default"]


@pytest.mark.parametrize(
    ("name", "table_bytes"), [("embedding", 64 * 8 * 4), ("embedding_sparse", 32 * 16 * (8 * 4 + 8))]
)
def test_the_all_reduce_alone_carries_what_one_backward_has_to_tell(name: str, table_bytes: int):
    task = workload(name, tiny=True)  # type: ignore[arg-type]
    model = task.model()
    layers = sum(p.nbytes for p in model.layers.parameters())
    assert contestants.gradient_bytes(model, task, rank=0) == table_bytes + layers
    assert all(param.grad is None for param in model.parameters())


def test_a_setting_that_the_installed_torch_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch):
    class Older:
        def __init__(self, module: nn.Module, gradient_as_bucket_view: bool = False, static_graph: bool = False):
            pass

    monkeypatch.setattr(contestants, "NativeDDP", Older)
    assert contestants.unknown_to_torch(tuple(SETTINGS)) == ["batched"]


def test_only_deepspeed_may_be_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert contestants.not_installed(get_args(OtherName)) == ["zero1"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert contestants.not_installed(get_args(OtherName)) == []
