"""The transport among real ranks: gloo's bits, what goes elsewhere, who dies when, and what is left behind."""

from __future__ import annotations

import datetime
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minddp.transport import ProcessGroupTransport, SharedMemoryTransport, open_transport
from minddp.transport.shared_memory import CannotConnect, connect_ranks, exchange, rendezvous
from minddp.transport.shared_memory.messages import DTYPES
from tests.ranks import RankFailure, RankPool

CPU = torch.device("cpu")
Ranks = Callable[[int], RankPool]


def default_group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def opened() -> SharedMemoryTransport:
    transport = open_transport("shared_memory", default_group())
    assert isinstance(transport, SharedMemoryTransport)
    return transport


def ones(transport: SharedMemoryTransport, numel: int) -> torch.Tensor:
    return transport.allocate(numel, torch.float32, CPU).fill_(1)


def random_values(rank: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of very different magnitudes, so that every order of addition rounds differently."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    magnitudes = torch.randint(-6, 7, (numel,), generator=generator).double().exp2()
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * magnitudes).to(dtype)


# ---------------------------------------------------------------------- what comes out

Case = tuple[int, torch.dtype, int]
cases = st.tuples(
    st.one_of(st.integers(1, 64), st.integers(1, 3000), st.integers(1, 200_000), st.just(600_003)),
    st.sampled_from(DTYPES),
    st.integers(0, 1000),
)


def differing(rank: int, cases: list[Case]) -> list[Case]:
    """The cases in which gloo's sum has other bits. All are under way at the same time."""
    transport, group = opened(), default_group()
    under_way = []
    for numel, dtype, seed in cases:
        values = random_values(rank, numel, dtype, seed)
        by_gloo, copied = values.clone(), values.clone()
        resident = transport.allocate(numel, dtype, CPU).copy_(values)
        works = [transport.all_reduce(resident), group.allreduce([by_gloo]), transport.all_reduce(copied)]
        under_way.append((works, by_gloo, resident, copied))
    for works, *_ in under_way:
        for work in works:
            work.wait()
    return [
        case
        for case, (_, by_gloo, resident, copied) in zip(cases, under_way, strict=True)
        if not (torch.equal(resident, by_gloo) and torch.equal(copied, by_gloo))
    ]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_have_gloos_bits(ranks: Ranks, world_size: int) -> None:
    @settings(max_examples=6, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(cases, min_size=1, max_size=6))
    def search(drawn: list[Case]) -> None:
        assert ranks(world_size).run(differing, drawn) == [[]] * world_size

    search()


def sum_of_odd_tensors(rank: int) -> dict[str, bool]:
    """Tensors that are no whole segment. Where addition is exact, every rank must get the sum."""
    transport = opened()
    shared = transport.allocate(100, torch.float32, CPU).copy_(torch.arange(100) * (rank + 1))
    transport.all_reduce(shared[10:20].view(2, 5)).wait()
    columns = torch.arange(12.0).view(3, 4).t()
    transport.all_reduce(columns).wait()
    strided = ones(transport, 100)[::2]
    transport.all_reduce(strided).wait()
    leaf = torch.nn.Parameter(torch.ones(5))
    transport.all_reduce(leaf).wait()
    numbers = torch.tensor([rank, 1], dtype=torch.int32)
    transport.all_reduce(numbers).wait()
    empty = torch.empty(0)
    transport.all_reduce(empty).wait()
    transport.all_reduce(transport.allocate(0, torch.float32, CPU)).wait()
    sparse = torch.eye(3).to_sparse()
    [summed] = [sparse]
    transport.all_reduce(summed).wait()
    pairs = torch.view_as_real(transport.allocate(4, torch.complex64, CPU).fill_(1 + 2j))
    transport.all_reduce(pairs).wait()
    return {
        "a part": torch.equal(shared[10:20], 3 * torch.arange(10.0, 20)) and shared[20] == 20 * (rank + 1),
        "columns": torch.equal(columns, 2 * torch.arange(12.0).view(3, 4).t()),
        "strided": bool(strided.eq(2).all()),
        "parameter": bool(leaf.eq(2).all()) and leaf.requires_grad,
        "int32": numbers.tolist() == [1, 2],
        "sparse": torch.equal(summed.to_dense(), 2 * torch.eye(3)),
        "complex": pairs.tolist() == [[2, 4]] * 4,
    }


def test_tensors_of_all_kinds_are_summed(ranks: Ranks) -> None:
    for results in ranks(2).run(sum_of_odd_tensors):
        assert [kind for kind, is_right in results.items() if not is_right] == []


def error_of_unknown_dtype(rank: int) -> list[str]:
    errors = []
    for transport in (opened(), ProcessGroupTransport(default_group())):
        try:
            transport.all_reduce(torch.ones(3, dtype=torch.int16)).wait()
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
    return errors


def test_dtypes_that_it_does_not_know_are_the_process_groups_affair(ranks: Ranks) -> None:
    for errors in ranks(2).run(error_of_unknown_dtype):
        assert len(errors) == 2
        assert errors[0] == errors[1]


def read_by_and_by(rank: int) -> list[Any]:
    """What `wait(timeout)` and `is_completed` say while rank 1 is late, of a copied tensor."""
    transport, tensor = opened(), torch.ones(1000)
    if rank == 1:
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
    return [*said, work.is_completed(), tensor.sum().item(), transport.waits_again]


def test_waiting_can_be_given_up_and_taken_up_again(ranks: Ranks) -> None:
    assert ranks(2).run(read_by_and_by)[0] == [False, True, True, 3000.0, True]


# ---------------------------------------------------------------------- together with others


def wait_in_different_orders(rank: int) -> bool:
    """Two transports and the user's own collectives, launched in one order, waited for in different ones."""
    first, second, group = opened(), opened(), default_group()
    for _ in range(20):
        tensors = [ones(first, 100_000), ones(second, 50_000), torch.ones(10)]
        works = [
            first.all_reduce(tensors[0]),
            group.allreduce([tensors[2]]),
            second.all_reduce(tensors[1]),
        ]
        for work in works if rank == 0 else reversed(works):
            work.wait()
        if not all(tensor.eq(2).all() for tensor in tensors):
            return False
    return True


def test_no_order_of_waiting_can_deadlock(ranks: Ranks) -> None:
    assert ranks(2).run(wait_in_different_orders) == [True, True]


def wait_only_after_a_barrier(rank: int) -> bool:
    """Rank 0 is blocked elsewhere while rank 1 needs its chunk: its substitute does it."""
    transport = opened()
    tensor = ones(transport, 1000)
    work = transport.all_reduce(tensor)
    if rank == 0:
        dist.barrier()
        work.wait()
    else:
        work.wait()
        dist.barrier()
    return bool(tensor.eq(2).all())


def test_a_rank_that_is_busy_elsewhere_holds_nobody_up(ranks: Ranks) -> None:
    assert ranks(2).run(wait_only_after_a_barrier) == [True, True]


def go_on_after_failure(rank: int) -> tuple[str, float]:
    transport = opened()
    try:
        transport.all_reduce(ones(transport, 10 + rank)).wait()
        message = "no error"
    except RuntimeError as error:
        message = str(error)
    del transport
    again = open_transport("shared_memory", dist.new_group())
    tensor = ones(again, 3)
    again.all_reduce(tensor).wait()
    return message, tensor.sum().item()


def test_a_new_group_works_after_a_failure(ranks: Ranks) -> None:
    for message, total in ranks(2).run(go_on_after_failure):
        assert "rank 0 has 10 elements of torch.float32, but rank 1 has 11" in message
        assert total == 6


# ---------------------------------------------------------------------- falling back


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def open_on_strange_hosts(rank: int, kind: str, strange_rank: int | None) -> tuple[str, list[str]]:
    lines, log, introduce = _Lines(), logging.getLogger("minddp.transport"), rendezvous._introduce
    log.addHandler(lines)
    level = log.level
    log.setLevel(logging.INFO)
    if rank == strange_rank:
        rendezvous._introduce = lambda listener: introduce(listener) | {"machine": "elsewhere"}
    try:
        transport = open_transport(kind, default_group())
        tensor = transport.allocate(3, torch.float32, CPU).fill_(1)
        transport.all_reduce(tensor).wait()
        assert tensor.sum().item() == 3 * transport.world_size
        return type(transport).__name__, lines.lines
    finally:
        rendezvous._introduce = introduce
        log.removeHandler(lines)
        log.setLevel(level)


@pytest.mark.parametrize(("kind", "level"), [("shared_memory", "WARNING"), ("auto", "INFO")])
def test_all_fall_back_together_and_one_says_why(ranks: Ranks, kind: str, level: str) -> None:
    results = ranks(3).run(open_on_strange_hosts, kind, 2)
    assert [name for name, _ in results] == ["ProcessGroupTransport"] * 3
    [line] = results[0][1]
    assert line.startswith(level)
    assert "rank 2 is on another host than rank 0" in line
    assert results[1][1] == results[2][1] == []


def test_auto_is_shared_memory_where_it_can_be_had(ranks: Ranks) -> None:
    assert ranks(2).run(open_on_strange_hosts, "auto", None) == [("SharedMemoryTransport", [])] * 2


def open_elsewhere(rank: int) -> list[str]:
    alone = [dist.new_group([member]) for member in range(2)][rank]
    kinds = [open_transport("auto", alone), open_transport("auto", default_group(), torch.device("meta"))]
    return [type(transport).__name__ for transport in kinds]


def test_one_rank_and_other_devices_use_the_process_group(ranks: Ranks) -> None:
    assert ranks(2).run(open_elsewhere) == [["ProcessGroupTransport"] * 2] * 2


class OwnAllReduce(dist.ProcessGroup):
    """A group written in Python, as users plug them in."""


def test_a_group_with_an_all_reduce_of_its_own_keeps_it() -> None:
    with pytest.raises(CannotConnect, match="OwnAllReduce may have an all-reduce of its own"):
        connect_ranks(ProcessGroupTransport(OwnAllReduce(0, 2)), CPU)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="Unknown transport 'pigeon'"):
        open_transport("pigeon", None)


# ---------------------------------------------------------------------- dying


@pytest.fixture
def mortal() -> Iterator[RankPool]:
    """Three ranks that may be killed, with a short time limit."""
    pool = RankPool(3, group_timeout_s=3.0, grace_s=1.0)
    yield pool
    pool.kill()


def die_at(rank: int, moment: str) -> float:
    """Rank 1 is killed at a moment of its fourth all-reduce; the others see how long they wait for it."""
    transport = opened()
    tensor = ones(transport, 1_000_000)
    for _ in range(3):
        transport.all_reduce(tensor).wait()
    if rank == 1 and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and moment == "in the middle":
        exchange.reduce_chunk = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and moment == "after launching":
        exchange.reduce_chunk = lambda *_, **__: time.sleep(60)
        transport.all_reduce(tensor)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and moment == "with a child":
        if os.fork() == 0:  # which keeps copies of all sockets for longer than anybody would wait
            time.sleep(6)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    transport.all_reduce(tensor).wait()
    return 0.0


@pytest.mark.parametrize("moment", ["before", "in the middle", "after launching", "with a child"])
def test_the_death_of_a_rank_is_an_error_that_names_it(mortal: RankPool, moment: str) -> None:
    mortal.run(opened_and_closed)
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        mortal.run(die_at, moment)
    assert time.monotonic() - start < 8
    reports = failure.value.reports
    assert moment == "with a child" or "exit code -9" in reports[1]  # the child has the pool's pipe, too
    for rank in (0, 2):
        assert "Rank 1 was killed before all-reduce 3 was done" in reports[rank]


def opened_and_closed(rank: int) -> None:
    opened()


def stop_at_last(rank: int) -> None:
    transport = opened()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    transport.all_reduce(ones(transport, 10)).wait()


def test_a_rank_that_is_stopped_is_named_when_time_is_up(mortal: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        mortal.run(stop_at_last)
    for rank in (0, 1):
        assert "All-reduce 0 was not done within 3 s: Rank 2 has not begun it" in failure.value.reports[rank]


def die_while_connecting(rank: int) -> None:
    if rank == 1:
        rendezvous._let_in = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    opened()


def test_death_while_connecting_is_an_error(mortal: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        mortal.run(die_while_connecting)
    assert "exit code -9" in failure.value.reports[1]
    for rank in (0, 2):
        assert "RuntimeError" in failure.value.reports[rank]


def kill_everybody(rank: int) -> None:
    transport = opened()
    transport.all_reduce(ones(transport, 1000)).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_behind_when_all_are_killed(mortal: RankPool) -> None:
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(RankFailure):
        mortal.run(kill_everybody)
    assert {name for name in set(os.listdir("/dev/shm")) - before if "minddp" in name} == set()
    assert "minddp" not in Path("/proc/net/unix").read_text()


# ---------------------------------------------------------------------- coming and going


def footprint() -> tuple[int, int, int]:
    """Descriptors, threads and mapped segments."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps.count("memfd:minddp")


def come_and_go(rank: int, times: int) -> list[tuple[int, int, int]]:
    footprints = []
    for time_round in range(times):
        transport = opened()
        buckets = [ones(transport, 1000), ones(transport, 10_000)]
        for bucket in buckets:
            transport.all_reduce(bucket).wait()
        transport.all_reduce(torch.ones(10)).wait()
        del transport, buckets, bucket
        if time_round in (4, times - 1):
            dist.barrier()
            footprints.append(footprint())
    return footprints


def test_a_hundred_transports_leave_nothing(ranks: Ranks) -> None:
    for early, late in ranks(2).run(come_and_go, 100):
        assert early == late


def replace_memory(rank: int) -> tuple[int, int, bool]:
    """Buckets are replaced while somebody holds one of the old gradients; then nobody does."""
    transport = opened()
    bucket = ones(transport, 1000)
    transport.all_reduce(bucket).wait()
    mapped_before = footprint()[2]
    dist.barrier()  # or a faster peer's next segment would be counted
    held = bucket[5:7]
    for _ in range(10):
        bucket = ones(transport, 1000)
        transport.all_reduce(bucket).wait()
    is_kept = held.tolist() == [2, 2]
    del held
    for _ in range(2):  # in the first, the peers are told; in the second, they have heard
        transport.all_reduce(bucket).wait()
    dist.barrier()
    return mapped_before, footprint()[2], is_kept


def test_memory_that_nobody_looks_at_any_more_is_given_back_on_all_ranks(ranks: Ranks) -> None:
    for before, after, is_kept in ranks(2).run(replace_memory):
        assert is_kept
        assert after == before


def reduce_many_sizes_elsewhere(rank: int) -> int:
    transport = opened()
    for numel in (*range(1, 5000, 50), *range(5000, 1, -50)):
        transport.all_reduce(torch.ones(numel)).wait()
    return len(transport._idle)


def test_tensors_that_lie_elsewhere_share_one_segment(ranks: Ranks) -> None:
    assert ranks(2).run(reduce_many_sizes_elsewhere) == [1, 1]


def find_no_room(rank: int) -> str:
    import resource

    transport = opened()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        transport.allocate(1 << 20, torch.float32, CPU)
    except RuntimeError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "no error"


def test_no_room_is_an_error_with_a_remedy(ranks: Ranks) -> None:
    for rank, message in enumerate(ranks(2).run(find_no_room)):
        assert f"Rank {rank} found no room for 4,194,304 bytes" in message
        assert 'transport="process_group"' in message
