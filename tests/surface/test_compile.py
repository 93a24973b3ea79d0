"""torch.compile: the same graphs as with torch's class, cut at the buckets, and the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from tests.ranks import on_ranks


class Layers(nn.Module):
    """Six layers of 1.4 MiB, so that a capacity of 2 MiB holds two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def _wrapper_compiled(wrapper: Any, backend: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(wrapper(Layers(), bucket_cap_mb=2), backend=backend)


def _module_compiled(wrapper: Any, backend: Any) -> Callable[[Tensor], Tensor]:
    return wrapper(torch.compile(Layers(), backend=backend), bucket_cap_mb=2)


def _step_compiled(wrapper: Any, backend: Any) -> Callable[[Tensor], Tensor]:
    ddp = wrapper(Layers(), bucket_cap_mb=2)
    step = torch.compile(lambda x: ddp(2 * x), backend=backend)
    step.parameters = ddp.parameters
    return step


WAYS = {"wrapper": _wrapper_compiled, "module": _module_compiled, "step": _step_compiled}


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_graphs_and_bits_are_torchs(rank: int, way: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    graphs, grads = [], []
    for wrapper in (TorchDDP, minddp.DistributedDataParallel):
        torch._dynamo.reset()
        torch.manual_seed(0)
        counter = CompileCounterWithBackend("aot_eager")
        model = WAYS[way](wrapper, counter)
        for turn in range(3):
            x = torch.randn(4, 600, generator=torch.Generator().manual_seed(10 * turn + rank))
            model(x).sum().backward()
        graphs.append([len(graph.graph.nodes) for graph in counter.graphs])
        grads.append([param.grad for param in model.parameters()])
    theirs, ours = graphs
    assert ours == theirs
    assert len(theirs) >= 4, "the buckets have cut the graph"
    assert all(map(torch.equal, *grads))


@on_ranks(2)
def test_there_is_no_python_reducer(rank: int) -> None:
    with (
        torch._dynamo.config.patch(optimize_ddp="python_reducer"),
        pytest.raises(RuntimeError, match="Set it to True"),
    ):
        minddp.DistributedDataParallel(Layers())
