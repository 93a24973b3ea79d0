"""What all transports through memory do alike: shared memory on one host ("aa"), and the hierarchy of several."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minddp.transport.process_group import ProcessGroupTransport
from tests.ranks import on_ranks
from tests.transport.places import Ranks, default_group, footprint, ones, opened_on

everywhere = pytest.mark.parametrize("letters", ["aa", "aab"])


@on_ranks(lambda letters, **_: len(letters))
@everywhere
def test_unsupported_dtypes_use_the_process_group(rank: int, letters: str) -> None:
    errors = []
    for transport in (opened_on(letters), ProcessGroupTransport(default_group())):
        with pytest.raises((RuntimeError, ValueError)) as error:
            transport.all_reduce(torch.ones(3, dtype=torch.int16)).wait()
        errors.append(str(error.value))
    ours, process_groups = errors
    assert ours == process_groups


# ---------------------------------------------------------------------- waiting


def read_by_and_by(rank: int, letters: str, resident: bool) -> list[Any]:
    """The results of `wait(timeout)` and `is_completed` while the last rank, perhaps on another host, is late."""
    transport = opened_on(letters)
    tensor = ones(transport, 1000) if resident else torch.ones(1000)
    if rank == len(letters) - 1:
        dist.barrier()
        transport.all_reduce(tensor).wait()
        return []
    work = transport.all_reduce(tensor)
    said: list[Any] = [work.is_completed()]
    try:
        work.wait(datetime.timedelta(seconds=0.05))
    except RuntimeError as error:
        said.append("timed out" in str(error).lower())
    dist.barrier()
    work.wait()
    tensor.add_(1)
    work.wait()  # once more: does not bring the sum back
    return [*said, work.is_completed(), tensor.unique().tolist(), transport.waits_again]


@everywhere
@pytest.mark.parametrize("resident", [True, False], ids=["resident", "copied"])
def test_waiting_can_be_given_up_and_taken_up_again(ranks: Ranks, letters: str, resident: bool) -> None:
    *early, _ = ranks(len(letters)).run(read_by_and_by, letters, resident)
    assert early == [[False, True, True, [len(letters) + 1.0], True]] * len(early)


def wait_in_different_orders(rank: int, letters: str) -> bool:
    """Two transports and the user's own collectives, launched in one order, waited for in different ones."""
    first, second, group = opened_on(letters), opened_on(letters), default_group()
    for _ in range(20):
        tensors = [ones(first, 100_000), ones(second, 50_000), torch.ones(10)]
        works = [first.all_reduce(tensors[0]), group.allreduce([tensors[2]]), second.all_reduce(tensors[1])]
        for work in works if rank % 2 == 0 else reversed(works):
            work.wait()
        if not all(tensor.eq(len(letters)).all() for tensor in tensors):
            return False
    return True


@everywhere
def test_no_order_of_waiting_can_deadlock(ranks: Ranks, letters: str) -> None:
    assert ranks(len(letters)).run(wait_in_different_orders, letters) == [True] * len(letters)


@on_ranks(lambda letters, **_: len(letters))
@everywhere
def test_a_rank_that_is_busy_elsewhere_delays_no_other(rank: int, letters: str) -> None:
    """Rank 0 is blocked elsewhere while the others need its chunk: its progress thread adds it."""
    transport = opened_on(letters)
    tensor = ones(transport, 1000)
    work = transport.all_reduce(tensor)
    if rank == 0:
        dist.barrier()
        work.wait()
    else:
        work.wait()
        dist.barrier()
    assert bool(tensor.eq(len(letters)).all())


def go_on_after_failure(rank: int, letters: str) -> tuple[str, float]:
    transport = opened_on(letters)
    with pytest.raises(RuntimeError) as error:
        transport.all_reduce(ones(transport, 10 + rank)).wait()
    del transport
    again = opened_on(letters, dist.new_group())
    tensor = ones(again, 3)
    again.all_reduce(tensor).wait()
    return str(error.value), tensor.sum().item()


@everywhere
def test_a_new_group_works_after_a_failure(ranks: Ranks, letters: str) -> None:
    results = ranks(len(letters)).run(go_on_after_failure, letters)
    for rank, (message, total) in enumerate(results):
        on_the_other_host = letters[rank] != "a"
        words = "has failed" if on_the_other_host else "rank 0 has 10 elements of torch.float32, but rank 1 has 11"
        assert words in message
        assert total == 3 * len(letters)


# ---------------------------------------------------------------------- coming and going


@on_ranks(lambda letters, **_: len(letters))
@pytest.mark.parametrize(("letters", "times"), [("aa", 100), ("aab", 30)])
def test_many_transports_leave_nothing(rank: int, letters: str, times: int) -> None:
    footprints = []
    for time_round in range(times):
        transport = opened_on(letters)
        buckets = [ones(transport, 1000), ones(transport, 10_000)]
        for bucket in buckets:
            transport.all_reduce(bucket).wait()
        transport.all_reduce(torch.ones(10)).wait()
        transport.broadcast(torch.ones(10), 0).wait()
        del transport, buckets, bucket
        if time_round in (4, times - 1):
            dist.barrier()
            footprints.append(footprint())
    early, late = footprints
    assert all(now <= before for before, now in zip(early, late, strict=True)), (early, late)


@on_ranks(lambda letters, **_: len(letters))
@everywhere
def test_unused_memory_is_released_on_all_ranks(rank: int, letters: str) -> None:
    """Buckets are replaced while one of the old gradients is kept; then none is."""
    transport = opened_on(letters)
    bucket = ones(transport, 1000)
    transport.all_reduce(bucket).wait()
    mapped_before = footprint()[2]
    dist.barrier()  # or a faster peer's next segment would be counted
    held = bucket[5:7]
    for _ in range(10):
        bucket = ones(transport, 1000)
        transport.all_reduce(bucket).wait()
    kept = held.tolist()
    del held
    for _ in range(2):  # the first one sends the messages to the peers, the second follows their receipt
        transport.all_reduce(bucket).wait()
    dist.barrier()
    before, after, kept = (mapped_before, footprint()[2], kept)
    assert kept == [len(letters)] * 2
    assert after == before
