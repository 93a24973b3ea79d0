from __future__ import annotations

import os
import signal
import time

from minddp.tools.train.loop import stop_signals, vote
from tests.ranks import on_ranks
from tests.tools.train.runs import world_here


@on_ranks(2)
def test_a_signal_to_one_rank_stops_every_rank(rank: int) -> None:
    """Rank 1 receives SIGTERM before the second call, rank 0 SIGINT before the third."""
    comes = {(1, 1): signal.SIGTERM, (0, 2): signal.SIGINT}
    world, verdicts = world_here(rank), []
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals() as pending:
        for step in range(3):
            if (rank, step) in comes:
                os.kill(os.getpid(), comes[rank, step])
                while not pending():
                    time.sleep(0.001)
            verdicts.append(vote(world, pending()))
    assert signal.getsignal(signal.SIGTERM) == before
    assert verdicts == [None, "SIGTERM", "SIGTERM"]


def test_a_launcher_that_is_gone_counts_as_a_hang_up(monkeypatch) -> None:
    with stop_signals() as pending:
        assert pending() == 0
        monkeypatch.setattr(os, "getppid", lambda: -1)
        assert pending() == signal.SIGHUP
