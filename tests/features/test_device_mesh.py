"""device_mesh: one dimension of it is the ranks to average over; the others may be tensor parallelism.

Torch replaces the parameters of a tensor-parallel module by local ones before it is wrapped, so it is these that
are averaged, over the ranks that hold the same shard. From the first forward on the module has DTensors made from
them instead, and no parameters; so optimizers and these tests remember the parameters from before.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

import minddp
from tests.features.beside import Trail, Wrap, play, random
from tests.ranks import of_all_ranks, on_ranks


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


def train(ddp: Any, data_rank: int) -> Trail:
    params = dict(ddp.named_parameters())
    optimizer = torch.optim.AdamW(params.values(), lr=0.01)
    trail = []
    for step in range(4):
        optimizer.zero_grad()
        ddp(random(5, 6, rank=data_rank, step=step)).square().sum().backward()
        optimizer.step()
        grads = {f"{name}.grad": param.grad for name, param in params.items()}
        trail.append({name: tensor.detach().clone() for name, tensor in {**params, **grads}.items()})
    return trail


# ------------------------------------------------------------------ one dimension


def _on_a_line(wrap: Wrap, rank: int, mesh: DeviceMesh, options: dict[str, Any]) -> Trail:
    torch.manual_seed(0)
    ddp = wrap(FeedForward(), device_mesh=mesh, **options)
    assert ddp.process_group is mesh.get_group()
    assert ddp.device_mesh is mesh
    return train(ddp, rank)


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"static_graph": True, "gradient_as_bucket_view": True}], ids=str)
def test_one_dimension(rank: int, options: dict[str, Any]) -> None:
    play(rank, _on_a_line, init_device_mesh("cpu", (2,)), options)


# ------------------------------------------------------------------ data parallelism times tensor parallelism


def _on_a_square(wrap: Wrap, rank: int, mesh: DeviceMesh, options: dict[str, Any]) -> Trail:
    torch.manual_seed(0)
    net = FeedForward()
    parallelize_module(net, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    ddp = wrap(net, device_mesh=mesh["data"], **options)
    assert type(net.up.weight) is nn.Parameter
    assert net.up.weight.shape == (4, 6)
    assert net.down.weight.shape == (6, 4)
    return train(ddp, mesh["data"].get_local_rank())


@on_ranks(4)
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}],
    ids=str,
)
def test_a_slice_beside_tensor_parallelism(rank: int, options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    *_, last = play(rank, _on_a_square, mesh, options)
    of_rank = of_all_ranks((last["module.up.weight"], last["module.down.bias"]))
    (up_0, bias_0), (up_1, bias_1), (up_2, bias_2), (up_3, bias_3) = of_rank
    assert torch.equal(up_0, up_2)  # the same shard
    assert torch.equal(up_1, up_3)
    assert not torch.equal(up_0, up_1)
    assert all(torch.equal(bias_0, bias) for bias in (bias_1, bias_2, bias_3))


# ------------------------------------------------------------------ errors


@on_ranks(4)
def test_tensor_parallelism_excludes_mixed_precision(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = FeedForward()
    parallelize_module(net, mesh["tensor"], {"up": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"not possible for up\.bias, up\.weight: tensor parallelism"):
        minddp.DistributedDataParallel(
            net, device_mesh=mesh["data"], mixed_precision=_MixedPrecision(torch.bfloat16)
        )


@on_ranks(4)
def test_errors_are_torchs(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for arguments in ({"device_mesh": mesh}, {"device_mesh": mesh, "process_group": torch.distributed.group.WORLD}):
        with pytest.raises(RuntimeError) as theirs:
            TorchDDP(FeedForward(), **arguments)
        with pytest.raises(RuntimeError, match=re.escape(str(theirs.value))):
            minddp.DistributedDataParallel(FeedForward(), **arguments)
