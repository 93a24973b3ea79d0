"""The transport between real hosts, as far as one machine has such: network namespaces and a cable between them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import minddp
from benchmarks import hosts
from benchmarks.contestants import FLOOR
from benchmarks.namespaces import INTERFACE, Host, bytes_per_second, settle, two_hosts, why_there_can_be_none
from minddp.transport import open_transport
from tests.ranks import RankPool

CPU = torch.device("cpu")
NBYTES = 8 * 2**20
obstacle = why_there_can_be_none()
needs_hosts = pytest.mark.skipif(obstacle is not None, reason=f"no network namespaces here: {obstacle}")


@pytest.fixture(scope="module")
def measured() -> list[Any]:
    """The results of `count_bytes` and `train` on two ranks of each of two hosts."""
    pool = RankPool(4)
    with two_hosts("10gbit") as places:
        try:
            return pool.run(count_and_train, places, timeout_s=120)
        finally:
            pool.kill()


def count_and_train(rank: int, places: Sequence[Host]) -> tuple[Any, Any]:
    settle(places, 2, rank)
    group = dist.new_group()  # whose threads and connections are made there
    return count_bytes(rank, group), train(rank, group)


def bytes_sent() -> int:
    """Through the cable, by all ranks on this host so far."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise AssertionError(f"there is no {INTERFACE} here")


# ---------------------------------------------------------------------- what crosses


def count_bytes(rank: int, group: dist.ProcessGroup) -> dict[str, tuple[str, float, list[float]]]:
    """By kind of transport: which it became, the bytes that crossed for each byte of the tensor, and the sums."""
    counted = {}
    for kind in ("process_group", "hierarchical"):
        transport = open_transport(kind, group)
        tensor = transport.allocate(NBYTES // 4, torch.float32, CPU).fill_(rank + 1)
        dist.barrier(group)
        before = bytes_sent()
        dist.barrier(group)  # or another rank would begin before this one has read the counter
        transport.all_reduce(tensor).wait()
        dist.barrier(group)
        crossed = (bytes_sent() - before) / NBYTES
        counted[kind] = type(transport).__name__, crossed, tensor.unique().tolist()
    return counted


@needs_hosts
def test_no_byte_crosses_twice(measured: list[Any]) -> None:
    """See docs/hosts.md. What is above the bare bytes are headers."""
    for counted, _ in measured:
        assert counted["process_group"][::2] == ("ProcessGroupTransport", [10.0])
        assert counted["hierarchical"][::2] == ("SharedMemoryTransport", [10.0])
        assert 1.5 <= counted["process_group"][1] < 1.7
        assert 1.0 <= counted["hierarchical"][1] < 1.2


def train(rank: int, group: dist.ProcessGroup) -> tuple[str, list[float]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 70), torch.nn.Tanh(), torch.nn.Linear(70, 3))
    ddp = minddp.DistributedDataParallel(model, process_group=group, transport="hierarchical", bucket_cap_mb="auto")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(16):  # enough for the buckets to be tuned
        optimizer.zero_grad()
        ddp(torch.randn(5, 100)).square().mean().backward()
        optimizer.step()
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    assert ddp.tuning is not None
    return type(ddp._transport._transport).__name__, weights.tolist()


@needs_hosts
def test_training_with_tuned_buckets_keeps_all_ranks_equal(measured: list[Any]) -> None:
    trained = [of_rank for _, of_rank in measured]
    assert trained[0][0] == "SharedMemoryTransport"
    assert all(of_rank == trained[0] for of_rank in trained)


# ---------------------------------------------------------------------- the benchmark's arithmetic


def test_the_floor_of_the_wire_is_what_must_cross_at_the_cables_rate() -> None:
    floors = hosts.floors({FLOOR: np.array([0.003])}, gradient_bytes=125_000, config=hosts.Config(rate="1gbit"))
    assert floors["wire"] == {"process_group": 1.5, "hierarchical": 1.0}
    assert floors["no_wrapper"] == 3.0


# ---------------------------------------------------------------------- the hosts themselves


def namespaces() -> set[str]:
    return {path.name for path in Path("/run/netns").glob("minddp-*")}


@needs_hosts
def test_hosts_are_removed_also_when_something_goes_wrong() -> None:
    before = namespaces()

    def fail() -> None:
        with two_hosts("1gbit") as made:
            assert namespaces() - before == {host.namespace for host in made}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert namespaces() == before


@needs_hosts
def test_missing_support_is_reported_in_a_line_and_leaves_nothing() -> None:
    before = namespaces()
    code = "from benchmarks.namespaces import *; import os; os.environ['PATH'] = ''; print(why_there_can_be_none())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout == "no command `ip` here\n"
    assert namespaces() == before


def test_rates_are_those_of_tc() -> None:
    assert bytes_per_second("1gbit") == 125e6
    assert bytes_per_second("2.5Gbit") == 312.5e6
    for wrong in ("1", "gbit", "-1gbit", "1gbyte", "nangbit", "infgbit"):
        with pytest.raises(ValueError, match=f'"1gbit", but got {wrong!r}'):
            bytes_per_second(wrong)
