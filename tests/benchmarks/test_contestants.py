"""Both sides of a pair get the same options and the same weights, and all train to the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP

import minddp
from benchmarks import contestants, race
from benchmarks.contestants import (
    FLOOR,
    Contestant,
    OtherName,
    whole,
)
from benchmarks.race import Raced
from benchmarks.workloads import workload
from minddp.transport.backend import SharedMemoryGroup
from tests.ranks import of_all_ranks, on_ranks


def field_of(settings: Sequence[str], transports: Sequence[str], others: Sequence[str]) -> list[Contestant]:
    pairs = contestants.pairs(settings, transports)
    return [Contestant(FLOOR, "floors"), *pairs, *map(contestants.other, others)]


@contextlib.contextmanager
def note_collectives() -> Iterator[list[str]]:
    """The names of the collectives in shared memory that the backend is asked for."""
    launch, names = SharedMemoryGroup._launch, []

    def note(self: SharedMemoryGroup, steps: Any, *arguments: Any, **options: Any) -> Any:
        names.append(steps.__name__)
        return launch(self, steps, *arguments, **options)

    with mock.patch.object(SharedMemoryGroup, "_launch", note):
        yield names


def test_a_heat_is_torch_and_minddp_by_each_transport_at_one_setting():
    field = field_of(["default", "views"], ["process_group", "shared_memory", "auto"], ["ddp_over_minddp", "zero"])
    assert race.heats(field) == [
        ["no wrapper"],
        [
            "torch default",
            "minddp default",
            "minddp default, shared memory",
            "minddp default, auto",
            "torch default, backend minddp",
        ],
        ["torch views", "minddp views", "minddp views, shared memory"],
        ["torch zero"],
    ]
    baselines = {c.name: c.baseline for c in field}
    assert baselines["minddp views, shared memory"] == "torch views"
    assert baselines["torch zero"] == "torch default"
    assert baselines[FLOOR] is None


@on_ranks(2)
@pytest.mark.parametrize(("control", "seat"), [(False, minddp.DistributedDataParallel), (True, NativeDDP)])
def test_contestants_are_wrapped_copies_of_one_model(rank: int, control: bool, seat: type) -> None:
    torch.manual_seed(rank)  # so that only the wrappers' own broadcast makes the ranks agree
    field = contestants.pairs(["default", "views"], ["process_group"], control=control)
    models = race.enter(field, nn.Linear(2, 2))
    assert len({id(p) for m in models.values() for p in m.parameters()}) == 2 * len(models)
    built = {
        name: (type(m), next(m.parameters()).sum().item(), getattr(m, "gradient_as_bucket_view", False))
        for name, m in models.items()
    }
    assert {name: kind for name, (kind, _, _) in built.items()} == {
        "torch default": NativeDDP,
        "torch views": NativeDDP,
        "minddp default": seat,
        "minddp views": seat,
    }
    assert len({total for _, total, _ in built.values()}) == 1
    assert [name for name, (_, _, views) in built.items() if views] == ["torch views", "minddp views"]


@on_ranks(2)
def test_all_wrappers_train_to_the_same_bits_and_none_does_not(rank: int) -> None:
    torch.manual_seed(0)
    task = workload("transformer", "tiny")
    transports = ["process_group", "shared_memory", "auto"]
    field = field_of(["default", "views"], transports, get_args(OtherName))
    models = race.enter(field, task.model())
    in_shared_memory = set()
    for contestant in field:
        step = contestant.step(models[contestant.name], task, rank)
        with note_collectives() as names:
            for _ in range(3):
                step()
        if names:
            in_shared_memory.add(contestant.name)
    assert in_shared_memory == {
        c.name for c in field if c.name.endswith(("backend minddp", "shared memory", "auto"))
    }
    weights = {name: [whole(p.detach()).clone() for p in model.parameters()] for name, model in models.items()}
    expected = of_all_ranks(weights["torch default"])[0]
    for name, found in weights.items():
        assert all(map(torch.equal, found, expected)) == (name != FLOOR), name


def test_contestants_that_need_a_cpu_stay_out_on_a_gpu():
    field = field_of(["default"], ["process_group"], get_args(OtherName))
    names = [c.name for c in contestants.able(field, workload("transformer", "tiny"), "cuda")]
    assert names == ["no wrapper", "torch default", "minddp default", "torch fully_shard", "torch zero"]


def test_contestants_without_sparse_gradients_stay_out_of_that_workload():
    field = field_of(["default"], ["process_group"], ["fully_shard", "zero"])
    assert contestants.able(field, workload("transformer", "tiny")) == field
    left = contestants.able(field, workload("embedding_sparse", "tiny"))
    assert [c.name for c in left if c.baseline] == ["torch default", "minddp default"]


def test_a_setting_that_the_installed_torch_does_not_know_is_left_out_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class Older:
        def __init__(self, module: nn.Module, gradient_as_bucket_view: bool = False, static_graph: bool = False):
            pass

    monkeypatch.setattr(contestants, "NativeDDP", Older)
    assert contestants.supported(("default", "batched", "views_static")) == ("default", "views_static")
    assert "no such option: batched" in capsys.readouterr().out


@on_ranks(2)
@pytest.mark.parametrize(("changed_rank", "equal"), [(-1, True), (0, False), (1, False)])
def test_a_difference_on_one_rank_is_seen_on_all(rank: int, changed_rank: int, equal: bool) -> None:
    torch.manual_seed(0)
    pair = contestants.pairs(["default"], ["process_group"], control=True)
    models = race.enter(pair, nn.Linear(3, 3))
    if rank == changed_rank:
        with torch.no_grad():
            next(models["minddp default"].parameters()).add_(1e-3)
    assert Raced("", models, {}, seed=0).same_bits(pair[1]) == equal
