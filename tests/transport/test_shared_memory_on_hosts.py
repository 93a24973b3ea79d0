"""What all transports through memory do alike: shared memory on one host ("aa"), and the hierarchy of several."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minddp.transport.process_group import ProcessGroupTransport
from tests.transport.places import Ranks, default_group, footprint, ones, opened_on

everywhere = pytest.mark.parametrize("letters", ["aa", "aab"])


def error_of_unknown_dtype(rank: int, letters: str) -> list[str]:
    errors = []
    for transport in (opened_on(letters), ProcessGroupTransport(default_group())):
        with pytest.raises((RuntimeError, ValueError)) as error:
            transport.all_reduce(torch.ones(3, dtype=torch.int16)).wait()
        errors.append(str(error.value))
    return errors


@everywhere
def test_unsupported_dtypes_use_the_process_group(ranks: Ranks, letters: str) -> None:
    for ours, process_groups in ranks(len(letters)).run(error_of_unknown_dtype, letters):
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


def wait_only_after_a_barrier(rank: int, letters: str) -> bool:
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
    return bool(tensor.eq(len(letters)).all())


@everywhere
def test_a_rank_that_is_busy_elsewhere_delays_no_other(ranks: Ranks, letters: str) -> None:
    assert ranks(len(letters)).run(wait_only_after_a_barrier, letters) == [True] * len(letters)


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


def come_and_go(rank: int, letters: str, times: int) -> list[tuple[int, int, int]]:
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
    return footprints


@pytest.mark.parametrize(("letters", "times"), [("aa", 100), ("aab", 30)])
def test_many_transports_leave_nothing(ranks: Ranks, letters: str, times: int) -> None:
    for early, late in ranks(len(letters)).run(come_and_go, letters, times):
        assert all(now <= before for before, now in zip(early, late, strict=True)), (early, late)


def replace_memory(rank: int, letters: str) -> tuple[int, int, list[float]]:
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
    return mapped_before, footprint()[2], kept


@everywhere
def test_unused_memory_is_released_on_all_ranks(ranks: Ranks, letters: str) -> None:
    for before, after, kept in ranks(len(letters)).run(replace_memory, letters):
        assert kept == [len(letters)] * 2
        assert after == before
