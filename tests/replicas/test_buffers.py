"""Which buffers are synchronised, after any change of the module."""

from __future__ import annotations

import torch
from torch import nn

from minddp.replicas.buffers import Buffers


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))


def test_a_module_without_buffers_may_get_some() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    buffers = Buffers(module, ())
    assert buffers.named == {}
    module.append(Leaf())
    buffers.collect()
    [(name, tensor)] = module.named_buffers()
    assert (name, tensor is buffers.named[name]) == ("1.mean", True)
