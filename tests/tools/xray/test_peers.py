"""One clock for all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist

from minddp.platform.store import Messages
from minddp.tools.xray import peers
from minddp.tools.xray.peers import answer_time, clock_identity, on_clock_of_first
from minddp.tools.xray.recording import RankRecording
from tests.ranks import RankPool
from tests.tools.xray.made_up import Rank, layout, recording

OFFSET_NS = 10**15  # the clock of the second rank is this much earlier


def asked(rank: int) -> RankRecording | None:
    """The recording of the second rank on the clock of the first."""
    messages = Messages.open(dist.distributed_c10d._get_default_store(), "test_peers", rank, 2)
    if rank == 0:
        answer_time(messages, 1, limit_s=60)
        return None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "now_ns", lambda: time.perf_counter_ns() - OFFSET_NS)
        ours = replace(recording([Rank()], layout([[1]])).ranks[0], rank=1)
        return on_clock_of_first(messages, ours, limit_s=60)


def test_another_clock_is_found_within_the_error(ranks: Callable[[int], RankPool]) -> None:
    _, found = ranks(2).run(asked)
    made = recording([Rank()], layout([[1]])).ranks[0]
    moved_ns = {after.t_ns - before.t_ns for before, after in zip(made.events, found.events, strict=True)}
    assert len(moved_ns) == 1
    assert abs(moved_ns.pop() - OFFSET_NS) <= found.clock_error_ns
    assert 0 < found.clock_error_ns < 10**9
    assert abs(found.stopped_ns - made.stopped_ns - OFFSET_NS) <= found.clock_error_ns


def identity(rank: int) -> str:
    return clock_identity()


def test_processes_of_one_machine_read_one_clock(ranks: Callable[[int], RankPool]) -> None:
    assert set(ranks(2).run(identity)) == {clock_identity()}
