"""The transport straight on NCCL, beside torch's process group on the same card."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minddp.transport import open_transport
from minddp.transport.nccl import NcclTransport
from minddp.transport.nccl.nccl_transport import NCCL_TYPES
from minddp.transport.process_group import ProcessGroupTransport
from tests.gpu.ranks import WORLDS, GpuPool
from tests.parity.compare import same_bits
from tests.ranks import RankFailure

pytestmark = pytest.mark.usefixtures("only_on_a_card")


def opened() -> NcclTransport:
    group = dist.distributed_c10d._get_default_group()
    link = open_transport("nccl", group, torch.device("cuda", torch.cuda.current_device()))
    assert isinstance(link, NcclTransport)
    return link


def own(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1000 * numel + rank)
    return torch.randn(numel, generator=rng).mul(8).to(dtype).cuda()


def all_calls_beside_the_group(rank: int) -> list[str]:
    """What differs between NCCL called by us and by torch, for every dtype and odd sizes."""
    link, group = opened(), ProcessGroupTransport(dist.distributed_c10d._get_default_group())
    found = []
    for dtype in NCCL_TYPES:
        for numel in (0, 1, 77, 65_537):
            results = []
            for transport in (link, group):
                tensor = own(rank, numel, dtype)
                transport.all_reduce(tensor).wait()
                sent = own(rank, numel, dtype)
                transport.broadcast(sent, transport.world_size - 1).wait()
                results.append([tensor, sent, *transport.all_gather(own(rank, numel, dtype))])
                torch.cuda.synchronize()
            pairs = zip(*results, strict=True)
            found += [f"{dtype}, {numel}: {place}" for place, pair in enumerate(pairs) if not same_bits(*pair)]
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_every_call_gives_what_torchs_gives(world: str, gpu_ranks: Callable[[str], GpuPool]) -> None:
    """With gloo the sums of two ranks have one order, too."""
    assert gpu_ranks(world).run(all_calls_beside_the_group, timeout_s=100) == [[]] * WORLDS[world].size


def memory_is_let_go_of(rank: int) -> bool:
    """A tensor is dropped while its all-reduce has yet to run; its memory must not go to the next one."""
    link = opened()
    numel = 4 * 2**20
    for _ in range(20):
        tensor = torch.full((numel,), 1.0, device="cuda")
        work = link.all_reduce(tensor)
        del tensor
        other = torch.full((numel,), 7.0, device="cuda")
        work.wait()
        if not bool((other == 7.0).all()):
            return False
        del other
    return True


@pytest.mark.parametrize("world", ["nccl1", "nccl2"])
def test_memory_is_not_reused_before_the_collective_has_run(
    world: str, gpu_ranks: Callable[[str], GpuPool]
) -> None:
    assert all(gpu_ranks(world).run(memory_is_let_go_of, timeout_s=60))


# ------------------------------------------------------------------ peers that fail


def goes_on_until_an_error(rank: int, dies: bool) -> str:
    """Rank 1 exits, or stops responding, after a first collective. Rank 0's error, and how long that took."""
    link = opened()
    link._communicator._limit_s = 15.0
    link.all_reduce(torch.ones(1000, device="cuda")).wait()
    torch.cuda.synchronize()
    if rank == 1:
        if dies:
            os._exit(3)
        time.sleep(30)
        return "slept"
    began = time.monotonic()
    try:
        while time.monotonic() - began < 60:
            link.all_reduce(torch.ones(10**6, device="cuda")).wait()
            torch.cuda.synchronize()
    except RuntimeError as error:
        return f"after {time.monotonic() - began:.0f} s: {error}"
    return "no error"


def _error_of_rank_0(dies: bool) -> str:
    pool = GpuPool(WORLDS["gloo2"], grace_s=70.0)
    try:
        return pool.run(goes_on_until_an_error, dies, timeout_s=100)[0]
    except RankFailure as failure:
        return failure.results.get(0, str(failure))
    finally:
        pool.kill()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("dies", [True, False])
def test_a_peer_that_ends_or_stops_responding_is_reported(dies: bool) -> None:
    text = _error_of_rank_0(dies)
    print(text)
    assert "The communicator has been aborted" in text
    assert "checkpoint" in text


def opens_and_closes(rank: int) -> int:
    """Communicators that are dropped must be destroyed, or a job that wraps often runs out of memory."""
    free = []
    for _ in range(5):
        link: Any = opened()
        link.all_reduce(torch.ones(10, device="cuda")).wait()
        torch.cuda.synchronize()
        del link
        gc.collect()
        time.sleep(0.3)  # the thread that polls it may hold a reference for a moment
        dist.barrier()
        free.append(torch.cuda.mem_get_info()[0])
        dist.barrier()  # the card may be shared: no rank opens the next one before all have measured
    return free[1] - free[-1]


def test_dropped_communicators_release_their_memory(gpu_ranks: Callable[[str], GpuPool]) -> None:
    assert max(gpu_ranks("nccl2").run(opens_and_closes, timeout_s=100)) < 64 * 2**20
