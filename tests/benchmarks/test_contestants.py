"""Both sides of a pair get the same options and the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP

import minddp
from benchmarks import contestants
from benchmarks.contestants import FLOOR, SETTINGS, SettingName
from tests.ranks import RankPool


def test_every_setting_that_can_be_asked_for_has_options():
    assert get_args(SettingName) == tuple(SETTINGS)


def test_heats_pair_the_two_implementations_at_each_setting():
    assert contestants.heats(["default", "views"]) == [
        ["no wrapper"],
        ["torch default", "minddp default"],
        ["torch views", "minddp views"],
    ]


def _built(rank: int, control: bool) -> dict[str, tuple[type, float, bool]]:
    torch.manual_seed(rank)  # so that only the wrappers' own broadcast makes the ranks agree
    model = nn.Linear(2, 2)
    models = contestants.build(model, ["default", "views"], control)
    assert len({id(p) for m in models.values() for p in m.parameters()}) == 2 * len(models)
    return {
        name: (type(m), next(m.parameters()).sum().item(), getattr(m, "gradient_as_bucket_view", False))
        for name, m in models.items()
    }


@pytest.mark.parametrize(("control", "seat"), [(False, minddp.DistributedDataParallel), (True, NativeDDP)])
def test_contestants_are_wrapped_copies_of_one_model(ranks: Callable[[int], RankPool], control: bool, seat: type):
    for built in ranks(2).run(_built, control):
        assert {name: kind for name, (kind, _, _) in built.items()} == {
            FLOOR: nn.Linear,
            "torch default": NativeDDP,
            "torch views": NativeDDP,
            "minddp default": seat,
            "minddp views": seat,
        }
        assert len({total for name, (_, total, _) in built.items() if name != FLOOR}) == 1
        assert [name for name, (_, _, views) in built.items() if views] == ["torch views", "minddp views"]


def test_a_setting_that_the_installed_torch_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch):
    class Older:
        def __init__(self, module: nn.Module, gradient_as_bucket_view: bool = False, static_graph: bool = False):
            pass

    monkeypatch.setattr(contestants, "NativeDDP", Older)
    assert contestants.unknown_to_torch(tuple(SETTINGS)) == ["batched"]
