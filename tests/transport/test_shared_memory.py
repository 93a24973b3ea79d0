"""The transport among real ranks: gloo's bits, what uses the process group, killed ranks, what is left behind.

What is as on several hosts: `test_shared_memory_on_hosts.py`.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minddp.transport import open_transport
from minddp.transport.process_group import ProcessGroupTransport
from minddp.transport.shared_memory import collectives, rendezvous
from minddp.transport.shared_memory.rendezvous import CannotConnect
from minddp.transport.shared_memory.shared_memory_transport import SharedMemoryTransport, require_gloo
from tests.ranks import RankFailure, RankPool, on_ranks
from tests.transport.places import (
    CPU,
    Case,
    OwnAllReduce,
    Ranks,
    default_group,
    differing,
    footprint,
    log_lines,
    mortal_ranks,
    ones,
    opened,
    random_values,
    search,
)

# ---------------------------------------------------------------------- what comes out


def other_than_gloos(rank: int, cases: list[Case]) -> list[Case]:
    def by_gloo(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
        values = random_values(rank, numel, dtype, seed)
        default_group().allreduce([values]).wait()
        return values

    return differing(opened(), cases, by_gloo)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_have_gloos_bits(ranks: Ranks, world_size: int) -> None:
    search(lambda drawn: ranks(world_size).run(other_than_gloos, drawn), num_examples=6)


# ---------------------------------------------------------------------- falling back


@on_ranks(3)
@pytest.mark.parametrize(
    ("kind", "host_of_rank_2", "level"),
    [("shared_memory", "elsewhere", "WARNING"), ("auto", "elsewhere", "INFO"), ("auto", "here", None)],
)
def test_all_ranks_fall_back_together_and_one_logs_the_reason(
    rank: int, kind: str, host_of_rank_2: str, level: str | None
) -> None:
    host = host_of_rank_2 if rank == 2 else "here"
    with mock.patch.object(rendezvous, "name_of_host", return_value=host), log_lines() as lines:
        transport = open_transport(kind, default_group())
    tensor = transport.allocate(3, torch.float32, CPU).fill_(1)
    transport.all_reduce(tensor).wait()
    assert tensor.sum().item() == 9
    assert type(transport) is (SharedMemoryTransport if level is None else ProcessGroupTransport)
    if level is None or rank > 0:
        assert lines == []
    else:
        assert re.match(f"{level} .*rank 2 is on another host than rank 0", *lines)


@on_ranks(2)
def test_one_rank_and_other_devices_use_the_process_group(rank: int) -> None:
    alone = [dist.new_group([member]) for member in range(2)][rank]
    assert type(open_transport("auto", alone)) is ProcessGroupTransport
    assert type(open_transport("auto", default_group(), torch.device("meta"))) is ProcessGroupTransport


def test_a_group_with_an_all_reduce_of_its_own_keeps_it() -> None:
    with pytest.raises(CannotConnect, match="OwnAllReduce may have an all-reduce of its own"):
        require_gloo(ProcessGroupTransport(OwnAllReduce(0, 2)), CPU)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="Unknown transport 'pigeon'"):
        open_transport("pigeon", None)


# ---------------------------------------------------------------------- dying


@pytest.fixture
def mortal() -> Iterator[RankPool]:
    with mortal_ranks() as pool:
        yield pool


def die_at(rank: int, moment: str, folder: Path) -> None:
    """Rank 1 is killed at a moment of its fourth all-reduce; the others note in `folder` that they wait no more."""
    transport = opened()
    tensor = ones(transport, 1_000_000)
    for _ in range(3):
        transport.all_reduce(tensor).wait()
    if rank == 1 and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and moment == "in the middle":
        collectives.all_reduce_chunk = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and moment == "after launching":
        collectives.all_reduce_chunk = lambda *_, **__: time.sleep(60)
        transport.all_reduce(tensor)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and moment == "with a child":
        if os.fork() == 0:  # which keeps copies of all sockets for longer than any rank waits
            deadline = time.monotonic() + 60
            while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        transport.all_reduce(tensor).wait()
    finally:
        (folder / str(rank)).touch()


@pytest.mark.parametrize("moment", ["before", "in the middle", "after launching", "with a child"])
def test_the_death_of_a_rank_is_an_error_that_names_it(mortal: RankPool, moment: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        mortal.run(die_at, moment, tmp_path)
    reports = failure.value.reports
    assert "exit code -9" in reports[1]
    for rank in (0, 2):
        assert "Rank 1 has ended before all_reduce 3 was done" in reports[rank]


def die_while_connecting(rank: int) -> None:
    if rank == 1:
        rendezvous.connect = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    rendezvous.CONNECT_LIMIT_S = 5.0
    opened()


def test_death_while_connecting_is_an_error(mortal: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        mortal.run(die_while_connecting)
    assert "exit code -9" in failure.value.reports[1]
    for rank in (0, 2):
        assert "RuntimeError" in failure.value.reports[rank]


def kill_everybody(rank: int, directory: Path) -> None:
    transport = opened()
    transport.all_reduce(ones(transport, 1000)).wait()
    sockets = [peer.socket for peer in transport._shared._host._engine.peers._peers.values()]
    inodes = [str(os.fstat(connection.fileno()).st_ino) for connection in sockets]
    (directory / str(rank)).write_text("\n".join(inodes))
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_behind_when_all_are_killed(mortal: RankPool, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(RankFailure):
        mortal.run(kill_everybody, tmp_path)
    assert {name for name in set(os.listdir("/dev/shm")) - before if "minddp" in name} == set()
    inodes = {inode for report in tmp_path.iterdir() for inode in report.read_text().split()}
    assert len(inodes) == 6  # three ranks with two peers each
    assert inodes.isdisjoint(Path("/proc/net/unix").read_text().split())


# ---------------------------------------------------------------------- memory


@on_ranks(2)
def test_tensors_that_lie_elsewhere_share_few_segments(rank: int) -> None:
    transport = opened()
    for numel in (*range(1, 5000, 50), *range(5000, 1, -50)):
        transport.all_reduce(torch.ones(numel)).wait()
    assert len(transport._shared._host._engine.own_memory._staging) <= 3  # a slow peer may still read the last one


@on_ranks(2)
def test_no_room_is_an_error_with_a_remedy(rank: int) -> None:
    transport, num_open = opened(), footprint()[0]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(
            RuntimeError, match=f'(?s)Rank {rank} has no room for 4,194,304 bytes.*transport="process_group"'
        ):
            transport.allocate(1 << 20, torch.float32, CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert footprint()[0] == num_open
