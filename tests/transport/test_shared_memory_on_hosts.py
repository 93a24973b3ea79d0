"""What all transports through memory do alike: shared memory on one host ("aa"), and the hierarchy of several."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist

from minddp.transport.process_group import ProcessGroupTransport
from minddp.transport.shared_memory.control_block import DTYPES
from tests.ranks import on_ranks
from tests.transport.places import CPU, default_group, footprint, ones, opened_on

on_hosts = on_ranks(lambda letters, **_: len(letters))
everywhere = pytest.mark.parametrize("letters", ["aa", "aab"])


@on_hosts
@everywhere
def test_unsupported_dtypes_use_the_process_group(rank: int, letters: str) -> None:
    errors = []
    for transport in (opened_on(letters), ProcessGroupTransport(default_group())):
        with pytest.raises((RuntimeError, ValueError)) as error:
            transport.all_reduce(torch.ones(3, dtype=torch.int16)).wait()
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@on_hosts
@pytest.mark.parametrize("letters", ["aa", "aab", "aabb"])
def test_tensors_of_all_kinds_are_summed(rank: int, letters: str) -> None:
    """Tensors that are no whole segment; addition is exact in all of them."""
    transport, total = opened_on(letters), sum(range(1, len(letters) + 1))
    shared = transport.allocate(100, torch.float32, CPU).copy_(torch.arange(100) * (rank + 1))
    leaf = torch.nn.Parameter(torch.full((5,), rank + 1.0))
    tensors = {
        "a part": shared[10:20].view(2, 5),
        "one": torch.tensor([rank + 1]),
        "empty": torch.empty(0),
        "empty, allocated": transport.allocate(0, torch.float32, CPU),
        "complex": torch.view_as_real(transport.allocate(4, torch.complex64, CPU).fill_((1 + 2j) * (rank + 1))),
        "parameter": leaf,
        "sparse": (torch.eye(3) * (rank + 1)).to_sparse(),
        **{str(dtype): torch.tensor([1, 0, 2], dtype=dtype) * (rank + 1) for dtype in DTYPES},
    }
    expected = {name: tensor.to_dense().detach() / (rank + 1) * total for name, tensor in tensors.items()}
    for work in [transport.all_reduce(tensor) for tensor in tensors.values()]:
        work.wait()
    assert shared[20] == 20 * (rank + 1), "what is beside a part stays as it is"
    assert leaf.requires_grad
    sums = {name: tensor.to_dense() for name, tensor in tensors.items()}
    assert [name for name, summed in sums.items() if not summed.equal(expected[name].to(summed.dtype))] == []


# ---------------------------------------------------------------------- waiting


@on_hosts
@everywhere
@pytest.mark.parametrize("resident", [True, False], ids=["resident", "copied"])
def test_waiting_can_be_given_up_and_taken_up_again(rank: int, letters: str, resident: bool) -> None:
    """While the last rank, perhaps on another host, is late."""
    transport = opened_on(letters)
    tensor = ones(transport, 1000) if resident else torch.ones(1000)
    if rank == len(letters) - 1:
        dist.barrier()
        transport.all_reduce(tensor).wait()
        return
    work = transport.all_reduce(tensor)
    assert not work.is_completed()
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
        work.wait(datetime.timedelta(seconds=0.05))
    dist.barrier()
    work.wait()
    tensor.add_(1)
    work.wait()  # once more: does not bring the sum back
    assert work.is_completed()
    assert tensor.unique().tolist() == [len(letters) + 1.0]
    assert transport.waits_again


@on_hosts
@everywhere
def test_no_order_of_waiting_can_deadlock(rank: int, letters: str) -> None:
    """Two transports and the user's own collectives, launched in one order, waited for in different ones."""
    first, second, group = opened_on(letters), opened_on(letters), default_group()
    for _ in range(20):
        tensors = [ones(first, 100_000), ones(second, 50_000), torch.ones(10)]
        works = [first.all_reduce(tensors[0]), group.allreduce([tensors[2]]), second.all_reduce(tensors[1])]
        for work in works if rank % 2 == 0 else reversed(works):
            work.wait()
        assert all(tensor.eq(len(letters)).all() for tensor in tensors)


@on_hosts
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
    assert tensor.eq(len(letters)).all()


@on_hosts
@everywhere
def test_a_new_group_works_after_a_failure(rank: int, letters: str) -> None:
    transport, on_the_other_host = opened_on(letters), letters[rank] != "a"
    words = (
        "has failed" if on_the_other_host else "rank 0 calls all_reduce of 10 elements of torch.float32, but rank 1"
    )
    with pytest.raises(RuntimeError, match=words):
        transport.all_reduce(ones(transport, 10 + rank)).wait()
    del transport
    again = opened_on(letters, dist.new_group())
    tensor = ones(again, 3)
    again.all_reduce(tensor).wait()
    assert tensor.sum().item() == 3 * len(letters)


# ---------------------------------------------------------------------- coming and going


@pytest.mark.slow
@on_hosts
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


@on_hosts
@everywhere
def test_unused_memory_is_released_on_all_ranks(rank: int, letters: str) -> None:
    """Buckets are replaced while one of the old gradients is kept; then none is."""
    transport = opened_on(letters)
    bucket = ones(transport, 100_000)
    transport.all_reduce(bucket).wait()
    mapped_before = footprint()[2]
    dist.barrier()  # or a faster peer's next segment would be counted
    held = bucket[5:7]
    for _ in range(10):
        bucket = ones(transport, 100_000)
        transport.all_reduce(bucket).wait()
    kept = held.tolist()
    del held
    for _ in range(130):  # the first one sends the messages to the peers, which read them at times
        transport.all_reduce(bucket).wait()
    dist.barrier()
    assert kept == [len(letters)] * 2
    assert footprint()[2] == mapped_before
