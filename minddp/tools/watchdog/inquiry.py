"""The ranks exchange their states through the store while a collective does not complete.

A rank that has waited too long asks: it increments a number in the store. On every rank a thread reads that number
about once a second, and when it has changed, writes the rank's state to the store, also while the main thread
sleeps, computes or waits. A rank that does not answer has ended, or its host is out of reach; on the same host the
process table shows which.

[Note: which rank asks, and when]
Each question costs an answer of every rank. So an occasion to ask (a wait has become long, a rank has left, a
process has ended) is claimed in the store, and on each host one rank asks and logs. The first diagnosis after which
no rank can go on stays in the store as the *verdict*: waiting ranks look for it once a second, or when their wait
fails, and all raise it: the cause everywhere, and not what follows from it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from minddp.platform.host import host_identity, is_running
from minddp.platform.store import POLL_S, gathering
from minddp.tools.watchdog.board import Board
from minddp.tools.watchdog.rank_state import EXITED, LEFT, SILENT, RankState

READ_EVERY_S = 1.0
ANSWER_LIMIT_S = 3 * READ_EVERY_S


class Inquiry:
    """Answers for one rank until `close`, and asks the others. All ranks of a group make theirs in one order.

    `state` makes the rank's state, `None` if its module is gone, to which it must hold no reference.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, state: Callable[[], RankState | None]):
        self._board = Board(store, rank)
        self._rank = rank
        self._world_size = world_size
        self._state = state
        self._host = host_identity("pid")
        self._pid_here: dict[int, int | None] = {}  # of each rank seen so far; `None` on another host
        self._answered = 0
        self.close = self._board.close
        self._board.open("minddp/watchdog")
        self._board.write((self._host, os.getpid()), "process", rank)
        self._board.start(self._turn, READ_EVERY_S, self._board.name)

    def ask(self, is_over: Callable[[], bool]) -> dict[int, RankState]:
        """The states of all ranks, or why there is none after `ANSWER_LIMIT_S` seconds, or once `is_over()`."""
        question = self._board.add(1, "asked")
        self._answer(question)
        found: dict[int, RankState] = {}
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while pending := set(range(self._world_size)) - found.keys():
            time.sleep(POLL_S)
            for rank in pending:
                if (state := self._board.read("answer", question, rank) or self._absent(rank)) is not None:
                    found[rank] = state
                elif time.monotonic() > deadline or is_over():
                    found[rank] = RankState(absence=SILENT)
        return dict(sorted(found.items()))

    def alarm(self) -> None:
        """Give all ranks that wait an occasion to ask."""
        self._board.add(1, "alarms")

    def occasions(self) -> list[str]:
        """Occasions to ask at once: alarms, and processes of this host that have ended."""
        ended = [f"end of rank {rank}" for rank in range(self._world_size) if self._has_ended(rank)]
        return [f"alarm {alarms}", *ended] if (alarms := self._board.add(0, "alarms")) else ended

    def claims(self, occasion: str) -> bool:
        """True on the first rank of a host that calls this for an occasion."""
        return self._board.add(1, "claims", self._host, occasion) == 1

    def verdict(self) -> str:
        """Empty if there is none."""
        return self._board.write_first("", "verdict")

    def settle(self, diagnosis: str) -> str:
        """The verdict; `diagnosis` becomes it if there is none, and is returned if the store has ended."""
        with contextlib.suppress(RuntimeError):
            diagnosis = self._board.write_first(diagnosis, "verdict")
            self.alarm()
        return diagnosis

    def gather(self, occasion: str) -> Callable[[float], bool]:
        """See `gathering`; each rank has one occasion at a time."""
        board = self._board
        limit_s = default_pg_timeout.total_seconds()
        return gathering(board.store, board.key("gathered", occasion), self._rank, self._world_size, limit_s)

    def _absent(self, rank: int) -> RankState | None:
        """What is known of a rank that cannot answer. A process on another host is known only to have left."""
        left: RankState | None = self._board.read("left", rank)
        return replace(left or RankState(), absence=EXITED) if self._has_ended(rank) else left

    def _has_ended(self, rank: int) -> bool:
        """True if the process table of this host shows it."""
        if rank not in self._pid_here and (process := self._board.read("process", rank)) is not None:
            host, pid = process
            self._pid_here[rank] = pid if host == self._host else None
        pid_here = self._pid_here.get(rank)
        return pid_here is not None and not is_running(pid_here)

    def _turn(self, is_last: bool) -> None:
        """Answer what is asked. In the end, leave the last state behind."""
        asked = self._board.add(0, "asked")
        for question in range(self._answered + 1, asked + 1):
            self._answer(question)
        self._answered = asked
        if is_last:
            self._board.write(replace(self._state() or RankState(), absence=LEFT), "left", self._rank)
            self.alarm()
            of_ranks = product(("left", "process"), range(self._world_size))
            self._board.leave(self._world_size, [("asked",), ("alarms",), *of_ranks])

    def _answer(self, question: int) -> None:
        if (state := self._state()) is not None:
            self._board.write(state, "answer", question, self._rank)
