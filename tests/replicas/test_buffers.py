"""Which buffers are synchronised, after any change of the module."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from minddp.replicas.buffers import Buffers


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))


def tree() -> nn.Module:
    return nn.Sequential(Leaf(), nn.Sequential(nn.Linear(2, 2), Leaf()))


def _assigns_another_tensor(module: nn.Module) -> None:
    module[0].mean = torch.ones(2)


def _gets_another(module: nn.Module) -> None:
    module[1][0].register_buffer("late", torch.ones(3))


def _loses_one(module: nn.Module) -> None:
    del module[0].mean


def _has_none_for_a_while(module: nn.Module) -> None:
    module[0].mean = None


def _is_given_another_submodule(module: nn.Module) -> None:
    module[1][1] = Leaf()


def _is_given_one_more(module: nn.Module) -> None:
    module[1].append(Leaf())


def _has_another_dictionary(module: nn.Module) -> None:
    module[0].__dict__["_buffers"] = {"mean": torch.ones(2)}


def _shares_one(module: nn.Module) -> None:
    module[0].mean = module[1][1].mean


@pytest.mark.parametrize(
    "change",
    [
        _assigns_another_tensor,
        _gets_another,
        _loses_one,
        _has_none_for_a_while,
        _is_given_another_submodule,
        _is_given_one_more,
        _has_another_dictionary,
        _shares_one,
    ],
)
def test_what_changes_is_noticed_at_the_next_look(change: Callable[[nn.Module], None]) -> None:
    module = tree()
    buffers = Buffers(module, ())
    change(module)
    buffers.collect()
    _holds_those_of(buffers, module)


def test_a_module_without_buffers_may_get_some() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    buffers = Buffers(module, ())
    assert buffers.named == {}
    module.append(Leaf())
    buffers.collect()
    _holds_those_of(buffers, module)


def test_a_copy_uses_the_buffers_of_its_own_module() -> None:
    module, buffers = copy.deepcopy((_module := tree(), Buffers(_module, ())))
    module[0].mean = torch.ones(2)
    buffers.collect()
    _holds_those_of(buffers, module)


def test_ignored_buffers_are_left_out() -> None:
    module = tree()
    assert list(Buffers(module, {"0.mean"}).named) == ["1.1.mean"]


def _holds_those_of(buffers: Buffers, module: nn.Module) -> None:
    expected = dict(module.named_buffers())
    assert buffers.named.keys() == expected.keys()
    assert all(buffers.named[name] is tensor for name, tensor in expected.items())
