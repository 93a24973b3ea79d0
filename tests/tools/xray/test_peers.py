"""One clock for all ranks."""

from __future__ import annotations

import time
from unittest import mock

import torch.distributed as dist

from minddp.platform.store import Messages
from minddp.tools.xray import peers
from minddp.tools.xray.peers import answer_time, on_clock_of_first
from tests.ranks import on_ranks
from tests.tools.xray.made_up import Rank, layout, recording

OFFSET_NS = 10**15  # the clock of the second rank is this much earlier


@on_ranks(2)
def test_another_clock_is_found_within_the_error(rank: int) -> None:
    messages = Messages.open(dist.distributed_c10d._get_default_store(), "test_peers", rank, 2)
    if rank == 0:
        answer_time(messages, 1, limit_s=60)
        return
    made = recording([Rank()] * 2, layout([[1]])).ranks[1]
    with mock.patch.object(peers, "now_ns", side_effect=lambda: time.perf_counter_ns() - OFFSET_NS):
        found = on_clock_of_first(messages, made, limit_s=60)
    (moved_ns,) = {after.t_ns - before.t_ns for before, after in zip(made.events, found.events, strict=True)}
    assert moved_ns == found.stopped_ns - made.stopped_ns
    assert abs(moved_ns - OFFSET_NS) <= found.clock_error_ns
    assert 0 < found.clock_error_ns < 10**9
