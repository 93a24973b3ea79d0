"""Transports through memory on pretended hosts, and what the tests of all of them need.

One letter names the host of a rank: in "aab" ranks 0 and 1 share a host, and rank 2 is on another. "aa" is
shared memory alone.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minddp.transport import Transport, open_transport
from minddp.transport.shared_memory import rendezvous
from minddp.transport.shared_memory.control_block import DTYPES
from minddp.transport.shared_memory.shared_memory_transport import SharedMemoryTransport
from tests.ranks import RankPool

CPU = torch.device("cpu")
Ranks = Callable[[int], RankPool]


def default_group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


@contextmanager
def mortal_ranks(group_timeout_s: float = 60.0, grace_s: float = 60.0) -> Iterator[RankPool]:
    """Three ranks that may be killed, and have all the time to notice it; to import torch is done."""
    pool = RankPool(3, group_timeout_s, grace_s)
    try:
        pool.run(arrive)
        yield pool
    finally:
        pool.kill()


def arrive(rank: int) -> None:
    pass


def opened() -> SharedMemoryTransport:
    transport = open_transport("shared_memory", default_group())
    assert isinstance(transport, SharedMemoryTransport)
    return transport


def opened_on(letters: str, group: dist.ProcessGroup | None = None) -> Transport:
    """As if the ranks of `group` were on hosts of these names."""
    group = group or default_group()
    with pretended_host(letters[group.rank()]):
        return open_transport("hierarchical", group)


def pretended_host(name: str) -> AbstractContextManager[object]:
    """Within, this rank is on the host of that name."""
    return mock.patch.object(rendezvous, "name_of_host", return_value=name)


def ones(transport: Transport, numel: int) -> torch.Tensor:
    return transport.allocate(numel, torch.float32, CPU).fill_(1)


Case = tuple[int, torch.dtype, int]  # of an all-reduce: how many elements, of what, and a seed
cases = st.tuples(
    st.one_of(st.integers(1, 64), st.integers(1, 3000), st.integers(1, 200_000), st.just(600_003)),
    st.sampled_from(DTYPES),
    st.integers(0, 1000),
)


def search(run: Callable[[list[Case]], list[list[Case]]], num_examples: int) -> None:
    """Draw cases, and run them on all ranks: on none may one be returned."""

    @settings(max_examples=num_examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(cases, min_size=1, max_size=6))
    def run_drawn(drawn: list[Case]) -> None:
        assert not any(run(drawn))

    run_drawn()


def differing(
    transport: Transport, cases: Sequence[Case], expected: Callable[[int, torch.dtype, int], torch.Tensor]
) -> list[Case]:
    """The cases in which a sum is not as expected. All are under way at the same time."""
    under_way = []
    for numel, dtype, seed in cases:
        values = random_values(transport.rank, numel, dtype, seed)
        tensors = [transport.allocate(numel, dtype, CPU).copy_(values), values]
        under_way.append((tensors, [transport.all_reduce(tensor) for tensor in tensors]))
    wrong = []
    for case, (tensors, works) in zip(cases, under_way, strict=True):
        for work in works:
            work.wait()
        total = expected(*case)
        if not all(tensor.equal(total) for tensor in tensors):
            wrong.append(case)
    return wrong


def random_values(rank: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Very different magnitudes, so that every order of addition rounds differently."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    magnitudes = torch.randint(-6, 7, (numel,), generator=generator).double().exp2()
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * magnitudes).to(dtype)


def footprint() -> tuple[int, int, int]:
    """Descriptors, threads and mapped segments."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps.count("memfd:minddp")


class OwnAllReduce(dist.ProcessGroup):
    """A group written in Python, as users plug them in."""


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """What the transports log meanwhile, each line after its level."""
    lines: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("minddp.transport")
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
