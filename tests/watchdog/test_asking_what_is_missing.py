"""Ranks exchange the names of missing gradients through the store, within a time limit."""

from __future__ import annotations

import time

import torch.distributed as dist

from minddp.watchdog.missing_gradients import ask_what_is_missing
from tests.fakes import FakeTransport


def test_ranks_exchange_what_is_missing() -> None:
    store = dist.HashStore()
    ranks = [FakeTransport(3, rank=rank, store=store) for rank in range(3)]
    first = ask_what_is_missing("pass 1", "a, b", ranks[2], patience_s=0.0)
    assert first.splitlines() == [
        f"Rank {rank} reports nothing missing: its gradients are complete and it waits, or it is late."
        for rank in (0, 1)
    ]
    second = ask_what_is_missing("pass 1", "c", ranks[0], patience_s=0.0)
    assert "Rank 1 reports nothing missing" in second
    assert "did not receive grad for rank 2: a, b" in second
    later = ask_what_is_missing("pass 2", "c", ranks[0], patience_s=0.0)
    assert later.count("reports nothing missing") == 2, "what was said of another pass does not count"


def test_there_may_be_no_store_and_no_other_rank() -> None:
    assert ask_what_is_missing("pass 1", "a", FakeTransport(2)) == ""
    assert ask_what_is_missing("pass 1", "a", FakeTransport(1, store=dist.HashStore())) == ""


def test_a_rank_that_misses_nothing_is_waited_for_only_so_long() -> None:
    begin = time.monotonic()
    ask_what_is_missing("pass 1", "a", FakeTransport(2, store=dist.HashStore()), patience_s=0.1)
    assert time.monotonic() - begin >= 0.1
