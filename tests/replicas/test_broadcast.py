"""Replicas: differences are named on every rank; equal models get equal weights. On real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import minddp
from minddp.replicas import broadcast as replicas
from minddp.transport.process_group import ProcessGroupTransport
from tests.fakes import FakeTransport
from tests.ranks import of_all_ranks, on_ranks


def _transport() -> ProcessGroupTransport:
    return ProcessGroupTransport(dist.group.WORLD)


@on_ranks(3)
def test_the_group_still_works_after_such_an_error(rank: int) -> None:
    with pytest.raises(RuntimeError, match="appears not to match sizes"):
        minddp.DistributedDataParallel(nn.Linear(2, 2 + (rank == 1)))
    ddp = minddp.DistributedDataParallel(nn.Linear(2, 1))
    ddp(torch.full((1, 2), float(rank))).sum().backward()
    assert ddp.module.weight.grad.flatten().tolist() == [1.0, 1.0]


# ------------------------------------------------------------------ broadcast


def _tensors_of_all_kinds(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        random(3, 2),
        random(5) > 0,
        torch.tensor(rank + 1),  # int64, 0-dim
        random(7).bfloat16(),
        random(3).half(),
        random(4).double(),
        torch.complex(random(3), random(3)),
        torch.complex(random(2).double(), random(2).double()),
        torch.tensor([rank + 1], dtype=torch.uint8),
        torch.tensor([rank - 5], dtype=torch.int32),
        torch.zeros(0, 3),
        random(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        random(4, 6).t(),
        torch.tensor([float("nan"), -0.0, float("inf")]) * (rank + 1),
    ]


def _bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [bytes(t.contiguous().reshape(-1).view(torch.uint8).tolist()) for t in tensors]


@on_ranks(3)
@pytest.mark.parametrize("coalesce_bytes", [1, 64, replicas.COALESCE_BYTES])
@pytest.mark.parametrize("source", [0, 2])
def test_every_dtype_and_layout_arrives(rank: int, coalesce_bytes: int, source: int) -> None:
    expected, tensors = _bits(_tensors_of_all_kinds(source)), _tensors_of_all_kinds(rank)
    assert (_bits(tensors) == expected) == (rank == source)
    strides, objects = [tensor.stride() for tensor in tensors], list(tensors)
    replicas.broadcast_coalesced(_transport(), tensors, source, coalesce_bytes)
    assert _bits(tensors) == expected
    assert all(a is b and a.stride() == s for a, b, s in zip(tensors, objects, strides, strict=True))


@on_ranks(3)
def test_a_tensor_with_gaps_arrives(rank: int) -> None:
    """Every second column: laid out with gaps, so that the columns between must stay as they are."""
    matrix = torch.full((2, 4), float(rank))
    replicas.broadcast_coalesced(_transport(), [matrix[:, ::2]])
    assert matrix.tolist() == [[0, rank, 0, rank]] * 2


def test_small_tensors_travel_together() -> None:
    transport = FakeTransport()
    replicas.broadcast_coalesced(transport, [torch.zeros(10) for _ in range(100)])
    assert transport.calls == [("broadcast from 0", 4000)]


def test_no_message_exceeds_the_bound_unless_one_tensor_does() -> None:
    transport = FakeTransport()
    replicas.broadcast_coalesced(transport, [torch.zeros(n) for n in (10, 10, 50, 10, 10, 10)], coalesce_bytes=80)
    assert [nbytes for _, nbytes in transport.calls] == [80, 200, 80, 40]


def test_a_broadcast_sends_the_devices_apart() -> None:
    with FakeTensorMode():
        tensors = [torch.empty(numel, device=f"cuda:{numel % 2}") for numel in (300, 501, 200, 101, 901, 50)]
        chunks = list(replicas._chunks(tensors, replicas.COALESCE_BYTES))
    assert [[tensor.numel() for tensor in chunk] for chunk in chunks] == [[300, 200, 50], [501, 101, 901]]


def test_nothing_to_broadcast_is_no_message() -> None:
    transport = FakeTransport()
    replicas.broadcast_coalesced(transport, [])
    assert transport.calls == []


class Model(nn.Module):
    """Parameters and buffers of many kinds, another one on each rank; one buffer is not persistent."""

    def __init__(self, rank: int):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.full((3,), float(rank)), requires_grad=False)
        for place, tensor in enumerate(_tensors_of_all_kinds(rank)):
            self.register_buffer(f"buffer{place}", tensor, persistent=place != 1)

    def state(self) -> list[bytes]:
        return _bits([*(p.detach() for p in self.parameters()), *self.buffers()])


@on_ranks(3)
def test_construction_broadcasts_rank_0s_parameters_and_buffers(rank: int) -> None:
    torch.manual_seed(rank)
    model = Model(rank)
    of_rank_0, *others = of_all_ranks(model.state())
    assert of_rank_0 not in others
    minddp.DistributedDataParallel(model)
    assert model.state() == of_rank_0


@on_ranks(3)
def test_a_subgroup_has_a_rank_0_of_its_own(rank: int) -> None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    torch.manual_seed(rank)
    model = nn.Linear(2, 1)
    ddp = minddp.DistributedDataParallel(model, process_group=group)
    start, rank_1s = model.weight.detach(), model.weight.detach().clone()
    dist.broadcast(rank_1s, 1, group)
    assert torch.equal(start, rank_1s)
    for _ in range(2):  # the second step is after the rebuild, which broadcasts the order
        ddp.zero_grad()
        ddp(torch.full((1, 2), float(rank))).sum().backward()
    assert model.weight.grad.flatten().tolist() == [1.5, 1.5]


class Changing(nn.Module):
    """Its buffers are filled in place, swapped for other memory, and replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        for name in ("filled", "swapped", "replaced"):
            self.register_buffer(name, torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.filled += x.detach().sum()
        self.swapped.data = self.swapped + x.detach().sum()
        self.replaced = self.replaced + x.detach().sum()
        return self.layer(x)


@on_ranks(2)
def test_buffers_that_change_in_any_way_are_rank_0s_in_every_forward(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(Changing())
    seen: list[list[float]] = []
    ddp.module.register_forward_pre_hook(lambda module, _: seen.append([b[0].item() for b in module.buffers()]))
    for _ in range(4):
        ddp(torch.full((1, 1), float(rank + 1))).sum().backward()
    assert seen == [[float(step)] * 3 for step in range(4)]


@on_ranks(2)
def test_the_first_forward_may_be_one_of_inference(rank: int) -> None:
    """Later steps outside of inference mode reuse the memory in which it sent the buffers."""
    ddp = minddp.DistributedDataParallel(nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)))
    with torch.inference_mode():
        ddp(torch.ones(2, 1))
    for _ in range(2):
        ddp(torch.full((2, 1), float(rank + 1))).sum().backward()
    with torch.no_grad():
        ddp(torch.ones(2, 1))  # the same on all ranks, from what rank 0 has
    mean = ddp.module[1].running_mean.tolist()
    assert of_all_ranks(mean) == [mean] * 2
