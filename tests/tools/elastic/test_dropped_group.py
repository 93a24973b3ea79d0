"""A group of which a collective never completes holds up neither its rank's waits nor its later steps."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
import torch.distributed as dist

from minddp.tools.elastic.term import drop
from minddp.tools.watchdog import RankState, Stuck, WatchedTransport, inquiry
from minddp.transport import open_transport
from tests.ranks import RankPool


def give_up_a_collective(rank: int, limit_s: float) -> bool:
    """On rank 0; rank 1 never comes. The session's other thread ends the wait, and the group is left behind.

    Where the wait is longer than `limit_s`, rank 0 is asking by then what rank 1, which does not answer, does.
    """
    inquiry.ANSWER_LIMIT_S = 3600.0
    over = open_transport("process_group", dist.group.WORLD, torch.device("cpu"))
    transport = WatchedTransport(over, limit_s, RankState)
    if rank == 1:
        time.sleep(5.0)
        return True
    work = transport.all_reduce(torch.ones(1))
    threading.Timer(0.2, transport.end_waits, ["Generation 1 was called off."]).start()
    with pytest.raises(Stuck, match=r"Generation 1 was called off\."):
        work.wait()
    with pytest.raises(Stuck):
        transport.all_reduce(torch.ones(1))
    in_a_cycle = [dist.group.WORLD, work, transport]
    in_a_cycle.append(in_a_cycle)  # type: ignore[arg-type]
    drop(dist.group.WORLD)
    dist.destroy_process_group()
    del transport, work, in_a_cycle
    gc.collect()
    return any(thread.name == "minddp/old group" for thread in threading.enumerate())


@pytest.mark.parametrize("limit_s", [3600.0, 0.05])
def test_neither_the_wait_nor_the_group_holds_up_its_rank(limit_s: float) -> None:
    pool = RankPool(2, group_timeout_s=600.0)
    try:
        assert pool.run(give_up_a_collective, limit_s, timeout_s=60.0) == [True, True]
    finally:
        pool.kill()
