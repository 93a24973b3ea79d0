from __future__ import annotations

import os
import signal
import time

from minddp.tools.train.stop import StopSignals, Verdict, vote
from tests.tools.train.runs import world_here


def _vote(rank: int) -> list[Verdict]:
    """Three calls; rank 1 receives SIGTERM before the second, rank 0 SIGINT before the third. Clocks differ."""
    comes = {(1, 1): signal.SIGTERM, (0, 2): signal.SIGINT}
    world, verdicts = world_here(rank), []
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        for step in range(3):
            if (rank, step) in comes:
                os.kill(os.getpid(), comes[rank, step])
                while not signals.received:
                    time.sleep(0.001)
            verdicts.append(vote(world, signals.pending, elapsed_s=step + 100.0 * rank))
    assert signal.getsignal(signal.SIGTERM) == before
    return verdicts


def test_a_signal_to_one_rank_stops_every_rank(ranks) -> None:
    expected = [Verdict(None, 0.0), Verdict("SIGTERM", 1.0), Verdict("SIGTERM", 2.0)]
    assert ranks(2).run(_vote) == [expected, expected]


def test_a_launcher_that_is_gone_counts_as_a_hang_up(monkeypatch) -> None:
    signals = StopSignals()
    assert signals.pending == 0
    monkeypatch.setattr(os, "getppid", lambda: 1 if signals._launcher != 1 else 2)
    assert signals.pending == signal.SIGHUP
