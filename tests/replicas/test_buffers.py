"""Which buffers are synchronised, after any change of the module."""

from __future__ import annotations

import copy

import torch
from torch import nn

from minddp.replicas.buffers import Buffers


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))


def tree() -> nn.Module:
    return nn.Sequential(Leaf(), nn.Sequential(nn.Linear(2, 2), Leaf()))


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
