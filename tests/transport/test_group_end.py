"""`destroy_process_group` ends the threads that serve the group, while wrappers live on."""

from __future__ import annotations

import sys
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import minddp
from minddp.platform import store
from minddp.transport import open_transport
from minddp.transport.process_group import ProcessGroupTransport
from tests.ranks import on_ranks


def test_the_end_is_within_destroy_process_group() -> None:
    """Also while a transport's store is held; and not if the caller has dropped what it was given."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group, ends = dist.group.WORLD, []
        assert group is not None
        transport = ProcessGroupTransport(group)
        kept = transport.when_group_ends(lambda: ends.append("kept"))
        transport.when_group_ends(lambda: ends.append("dropped"))
        assert ends == []
    finally:
        dist.destroy_process_group()
    assert ends == ["kept"]
    assert transport.store is not None
    assert kept is not None
    assert ProcessGroupTransport(group).store is None
    assert transport.when_group_ends(ends.clear) is None


@on_ranks(1)
def test_memory_of_a_group_without_shared_memory_is_on_the_cpu(rank: int) -> None:
    group = dist.new_group(backend="minddp")
    with torch.device("meta"):
        transport = open_transport("shared_memory", group)
        assert transport.allocate(3, torch.float32, torch.device("cpu")).device.type == "cpu"


def test_nothing_is_called_while_the_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules may be gone by then."""
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group, ends = dist.group.WORLD, []
    assert group is not None
    kept = ProcessGroupTransport(group).when_group_ends(lambda: ends.append("kept"))
    dist.destroy_process_group()
    assert kept is not None
    assert ends == []


def _began_after(before: list[threading.Thread]) -> set[str]:
    """Names of the threads that live now. Those of an earlier wrapper have the same names, and may yet end."""
    return {thread.name.partition("/")[0] for thread in threading.enumerate() if thread not in before}


@on_ranks(2)
@pytest.mark.parametrize(
    ("transport", "threads"),
    [("auto", {"minddp shared memory", "minddp"}), ("process_group", {"minddp"})],
)
def test_threads_end_with_the_group(rank: int, transport: str, threads: set[str]) -> None:
    before = threading.enumerate()
    group = dist.new_group([0, 1])
    ddp = minddp.DistributedDataParallel(nn.Linear(1, 1), process_group=group, transport=transport)
    ddp(torch.ones(1, 1)).sum().backward()
    assert _began_after(before) == threads
    dist.destroy_process_group(group)
    assert _began_after(before) == set()
    ddp.zero_grad()
    ddp(torch.full((1, 1), float(rank))).sum().backward()
    grads = [param.grad.item() for param in ddp.parameters()]
    assert grads == [0.5, 1.0]  # gloo still works, as for torch's wrapper


@on_ranks(2)
def test_threads_of_another_group_live_on(rank: int) -> None:
    before = threading.enumerate()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    ddps = [minddp.DistributedDataParallel(nn.Linear(1, 1), process_group=group) for group in groups]
    dist.destroy_process_group(groups[0])
    ddps[1](torch.ones(1, 1)).sum().backward()
    assert _began_after(before) == {"minddp shared memory", "minddp"}


@on_ranks(2)
def test_all_wrappers_of_a_group_use_one_connection_to_its_store(rank: int) -> None:
    with mock.patch.object(store, "own_connection", side_effect=store.own_connection) as opened:
        for _ in range(3):
            ddp = minddp.DistributedDataParallel(nn.Linear(2, 2), process_group=dist.new_group([0, 1]))
            for _ in range(2):
                minddp.DistributedDataParallel(ddp.module, process_group=ddp.process_group)
                ddp(torch.ones(1, 2)).sum().backward()
    assert opened.call_count == 3


def test_a_group_whose_store_cannot_carry_messages() -> None:
    """Torch's class needs no store either, but fails with this backend."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        ddp = minddp.DistributedDataParallel(nn.Linear(2, 2))
        for _ in range(3):
            ddp(torch.ones(1, 2)).sum().backward()
    finally:
        dist.destroy_process_group()
