"""Ranks that pretend to be on several hosts: the documented order, the transports, ranks that are killed.

One letter names the host of a rank: see `places.py`. What is as on one host: `test_shared_memory_on_hosts.py`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import reduce
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import minddp
from minddp.transport import Transport, backend, hierarchical, open_transport
from minddp.transport.process_group import ProcessGroupTransport
from minddp.transport.shared_memory import rendezvous
from minddp.transport.shared_memory.addition_order import (
    chunk_bounds,
)
from minddp.transport.shared_memory.shared_memory_transport import SharedMemoryTransport
from tests.ranks import RankFailure, RankPool, of_all_ranks, on_ranks
from tests.transport.places import (
    Case,
    OwnAllReduce,
    Ranks,
    default_group,
    differing,
    log_lines,
    mortal_ranks,
    ones,
    opened_on,
    pretended_host,
    random_values,
    search,
)

# ---------------------------------------------------------------------- what comes out


def route(chunk: int, world_size: int) -> list[int]:
    """The ranks in the order in which their addends join the sum; the last is the chunk's owner."""
    return [(chunk - step) % world_size for step in range(1, world_size + 1)]


def in_documented_order(addends: Sequence[torch.Tensor], letters: str) -> torch.Tensor:
    """See [Note: the order of addition between hosts]. Once more, without anything that moves bytes."""
    total, itemsize = torch.empty_like(addends[0]), addends[0].itemsize
    hosts = [[rank for rank, name in enumerate(letters) if name == host] for host in dict.fromkeys(letters)]
    num_lanes = min(map(len, hosts))

    def add(tensors: Iterator[torch.Tensor]) -> torch.Tensor:
        return reduce(torch.add, tensors)

    for seat in range(num_lanes):
        first, stop = chunk_bounds(seat, num_lanes, total.numel(), itemsize)
        of_host = [add(addends[ranks[at]][first:stop] for at in route(seat, len(ranks))) for ranks in hosts]
        for chunk in range(len(of_host)):
            part = slice(*chunk_bounds(chunk, len(of_host), stop - first, itemsize))
            total[first:stop][part] = add(of_host[host][part] for host in route(chunk, len(of_host)))
    return total


def other_than_documented(rank: int, letters: str, cases: list[Case]) -> list[Case]:
    transport = opened_on(letters)
    assert transport._shared._num_lanes == min(map(letters.count, letters))

    def documented(*case: Any) -> torch.Tensor:
        return in_documented_order([random_values(each, *case) for each in range(len(letters))], letters)

    return differing(transport, cases, documented)


@pytest.mark.parametrize("letters", ["aabb", "abab", "aab", "abb", "aabc", "aaab"])
def test_sums_have_the_documented_bits_on_all_ranks(ranks: Ranks, letters: str) -> None:
    search(lambda drawn: ranks(len(letters)).run(other_than_documented, letters, drawn), num_examples=3)


@on_ranks(3)
def test_other_collectives_use_the_process_group(rank: int) -> None:
    transport = opened_on("aab")
    tensor = torch.tensor([float(rank)])
    gathered = [each.item() for each in transport.all_gather(tensor)]
    transport.broadcast(tensor, source=2).wait()
    assert gathered == [0.0, 1.0, 2.0]
    assert tensor.tolist() == [2.0]


# ---------------------------------------------------------------------- which transport


@on_ranks(3)
@pytest.mark.parametrize(
    ("letters", "kind", "num_lanes"),
    [("aaa", SharedMemoryTransport, 0), ("abc", ProcessGroupTransport, 0), ("aba", SharedMemoryTransport, 1)],
)
def test_without_a_hierarchy_a_simpler_transport_is_used(
    rank: int, letters: str, kind: type, num_lanes: int
) -> None:
    transport = opened_on(letters)
    tensor = ones(transport, 3)
    transport.all_reduce(tensor).wait()
    assert type(transport) is kind
    assert kind is ProcessGroupTransport or transport._shared._num_lanes == num_lanes
    assert tensor.sum().item() == 9.0


@on_ranks(2)
def test_ranks_of_this_machine_are_on_one_host(rank: int) -> None:
    alone = [dist.new_group([member]) for member in range(2)][rank]
    assert type(open_transport("hierarchical", default_group())) is SharedMemoryTransport
    assert type(open_transport("hierarchical", alone)) is ProcessGroupTransport


@on_ranks(4)
def test_a_group_may_have_some_of_the_ranks(rank: int) -> None:
    group = dist.new_group([0, 1, 3])
    if rank != 2:
        transport = opened_on("aab", group)
        tensor = torch.tensor([10.0**rank])
        transport.all_reduce(tensor).wait()
        assert transport._shared._host._engine.num_ranks == (1 if rank == 3 else 2)
        assert tensor.item() == 1011.0


def test_groups_and_devices_that_it_is_not_for_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r'OwnAllReduce may .* Pass transport="process_group"'):
        open_transport("hierarchical", OwnAllReduce(0, 2))
    with pytest.raises(ValueError, match=r'the tensors are on cuda:0, not in .* Pass transport="process_group"'):
        open_transport("hierarchical", OwnAllReduce(0, 2), torch.device("cuda", 0))


@on_ranks(3)
def test_all_ranks_fall_back_together_and_one_logs_the_reason(rank: int) -> None:
    no_lane = mock.patch.object(backend, "Lane", side_effect=RuntimeError("for no reason"))
    with (
        mock.patch.object(rendezvous, "CONNECT_LIMIT_S", 2.0),
        no_lane if rank == 0 else nullcontext(),
        log_lines() as lines,
    ):
        transport = opened_on("aab")
    reason = "rank 0 cannot connect to the other hosts: for no reason"
    tensor = ones(transport, 3)
    transport.all_reduce(tensor).wait()
    assert tensor.sum().item() == 9
    assert type(transport) is ProcessGroupTransport
    assert [(line.startswith("WARNING"), reason in line) for line in lines] == ([(True, True)] if rank == 0 else [])


# ---------------------------------------------------------------------- dying


@pytest.fixture
def mortal() -> Iterator[RankPool]:
    with mortal_ranks() as pool:
        yield pool


KEPT: list[Transport] = []  # so that a failure is noticed elsewhere before the transport is dropped here


def die_at(rank: int, mortal_rank: int, moment: str) -> None:
    """A rank is killed at a moment of its fourth all-reduce; on hosts 0 | 1 2."""
    transport = opened_on("abb")
    KEPT.append(transport)
    tensor = ones(transport, 1_000_000)
    for _ in range(3):
        transport.all_reduce(tensor).wait()
    dist.barrier()
    if rank == mortal_rank:
        if moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(hierarchical, moment, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    transport.all_reduce(tensor).wait()


@pytest.mark.parametrize(
    ("mortal_rank", "moment", "noticed_by"),
    [
        (1, "before", [0, 2]),
        (1, "copy_to_all", [2]),  # rank 0 has had all that it needs
        (2, "before", [0, 1]),
        (0, "reduce_in_order", [1, 2]),
    ],
)
def test_the_death_of_a_rank_is_noticed_on_all_hosts(
    mortal: RankPool, mortal_rank: int, moment: str, noticed_by: list[int]
) -> None:
    with pytest.raises(RankFailure) as failure:
        mortal.run(die_at, mortal_rank, moment)
    reports = failure.value.reports
    assert "exit code -9" in reports.pop(mortal_rank)
    assert sorted(reports) == sorted(noticed_by)
    for rank, report in reports.items():
        is_neighbour = {rank, mortal_rank} == {1, 2}
        neighbours_word = f"Rank {mortal_rank} has ended before all_reduce 3 was done"
        assert (neighbours_word if is_neighbour else "between hosts, of ranks 0 and 1") in report, f"rank {rank}"


def stop_at_last(rank: int) -> None:
    transport = opened_on("abb")
    tensor = ones(transport, 10)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    transport.all_reduce(tensor).wait()


@pytest.mark.slow
def test_a_stopped_rank_is_named_with_its_host_at_the_time_limit() -> None:
    with mortal_ranks(group_timeout_s=4.0, grace_s=3.0) as pool, pytest.raises(RankFailure) as failure:
        pool.run(stop_at_last)
    expected = "Rank 1 has begun all_reduce 0 and not finished it within the timeout of 4 s: a process is stopped"
    assert all(expected in failure.value.reports[rank] for rank in (1, 2)), failure.value


# ---------------------------------------------------------------------- beneath the wrapper


@on_ranks(3)
def test_training_keeps_the_ranks_equal_and_comes_out_as_over_the_process_group(rank: int) -> None:
    weights = []
    for kind in ("process_group", "hierarchical"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(50, 70), torch.nn.Tanh(), torch.nn.Linear(70, 3))
        with pretended_host("aab"[rank]):
            ddp = minddp.DistributedDataParallel(model, transport=kind, bucket_cap_mb=0.01)
        for step in range(2):
            inputs = random_values(rank, 200, torch.float32, step).view(4, 50)
            ddp(inputs).square().mean().backward()
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
        weights.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    assert ddp._transport._transport._shared._num_lanes == 1
    assert all(torch.equal(weights[1], of_rank) for of_rank in of_all_ranks(weights[1]))
    assert torch.allclose(*weights, rtol=1e-4, atol=1e-6)
