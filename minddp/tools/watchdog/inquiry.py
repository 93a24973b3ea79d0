"""The ranks exchange their states through the store while a collective does not complete.

A rank that has waited too long increments a counter in the store. On every rank a thread reads this counter about
once a second; when it has changed, the thread posts the rank's state, also while the main thread sleeps, computes
or waits. If a rank does not answer, its process has ended or its host is out of reach; on the same host the process
table tells which.

[Note: which rank asks, and when]
Every rank has to answer each question. So ranks claim an occasion to ask (a wait has become long, a rank has left,
a process has ended) in the store, and on each host only one rank asks and logs. The first diagnosis of a wait that
can never end stays in the store as the *verdict*. Waiting ranks read it once a second, and when their wait fails.
All of them raise it, so every rank reports the cause instead of a consequence.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from minddp.platform.rank_processes import RankProcesses
from minddp.platform.repeating_thread import RepeatingThread
from minddp.platform.store import POLL_S, Messages
from minddp.tools.watchdog.diagnosis import Diagnosis, diagnose
from minddp.tools.watchdog.rank_state import EXITED, LEFT, SILENT, STOPPED, RankState
from minddp.transport.protocols import Transport

_log = logging.getLogger(__name__)
READ_EVERY_S = 1.0
ANSWER_LIMIT_S = 3 * READ_EVERY_S


class Inquiry:
    """Answers for one rank until `close`, and asks the others.

    All ranks of a group must create their inquiries in the same order. `state` returns the rank's state, or `None`
    if its module is gone; it must hold no reference to the module. `left`: why there is no answer after `close`.
    """

    def __init__(self, transport: Transport, state: Callable[[], RankState | None], left: str = LEFT):
        assert transport.store is not None
        self.messages = Messages.open(transport.store, "minddp/watchdog", transport.rank, transport.world_size)
        self._state, self.left = state, left
        self._processes = RankProcesses(self.messages)
        self._answered = 0
        self.group_end: object = None  # kept as long as this inquiry
        self._processes.post()
        self.close = RepeatingThread(self._turn, READ_EVERY_S, self.messages.topic).close

    def ask(self, is_over: Callable[[], bool]) -> dict[int, RankState | str]:
        """The state of each rank, or why it has none. Waits for `ANSWER_LIMIT_S`, or until `is_over()`."""
        question = self.messages.count("asked")
        self._answer(question)
        found: dict[int, RankState | str] = {}
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while pending := [rank for rank in range(self.messages.world_size) if rank not in found]:
            time.sleep(POLL_S)
            is_late = time.monotonic() > deadline or is_over()
            for rank in pending:
                state = self.messages.read(rank, "answer", question) or self._absence(rank)
                if state is None and is_late:
                    state = STOPPED if self._processes.is_stopped(rank) else SILENT
                if state is not None:
                    found[rank] = state
        return found

    def examine(self, waited_s: float, limit_s: float, wait: str, is_over: Callable[[], bool]) -> str | None:
        """The reason why a wait can never end, or `None`. `wait`: its name, equal on all ranks that wait in it.

        See [Note: which rank asks, and when], and [Note: how long to wait] in `watched_transport.py`.
        """
        interval = int(waited_s / limit_s).bit_length()  # of 1, 2-3, 4-7, 8-15, ... limits
        report = f"report {interval} of {wait}"
        occasions = [*self.occasions(), *([report] if interval else [])]
        if occasions and (verdict := self.messages.settled("verdict")):
            return str(verdict)
        if claimed := [occasion for occasion in occasions if self.claims(occasion)]:
            diagnosis = self.diagnose(is_over)
            if diagnosis.is_certain:
                return diagnosis.text
            if report in claimed:
                _log.warning("Waited for %.0f s so far. %s", waited_s, diagnosis.text)
        return None

    def diagnose(self, is_over: Callable[[], bool]) -> Diagnosis:
        try:
            return diagnose(self.ask(is_over))
        except RuntimeError as error:
            return Diagnosis(f"The store does not answer either ({error}): the rank that hosts it has ended.", True)

    def alarm(self) -> None:
        """Give all waiting ranks an occasion to ask."""
        self.messages.count("alarms")

    def occasions(self) -> list[str]:
        """Immediate occasions to ask: alarms, and processes of this host that have ended."""
        alarms, ranks = self.messages.count("alarms", add=0), range(self.messages.world_size)
        ended = [f"end of rank {rank}" for rank in ranks if self._processes.has_ended(rank)]
        return [f"alarm {alarms}", *ended] if alarms else ended

    def claims(self, occasion: str) -> bool:
        """True on the first rank of a host that calls this for an occasion."""
        return self.messages.count("claims", self._processes.host, occasion) == 1

    def settle(self, diagnosis: str) -> str:
        """Make `diagnosis` the verdict if there is none. Returns the verdict; `diagnosis` if the store is gone."""
        with contextlib.suppress(RuntimeError):
            diagnosis = self.messages.settle(diagnosis, "verdict")
            self.alarm()
        return diagnosis

    def _absence(self, rank: int) -> str | None:
        """Why a rank will not answer; `None` if it may."""
        if self._processes.has_ended(rank):
            return EXITED
        return self.messages.read(rank, "left")  # type: ignore[no-any-return]

    def _turn(self, is_last: bool) -> None:
        """Answer new questions, or leave."""
        asked = self.messages.count("asked", add=0)
        for question in range(self._answered + 1, asked + 1):
            self._answer(question)
        self._answered = asked
        if is_last:
            self.messages.post(self.left, "left")
            self.alarm()
            self.messages.leave("asked", "alarms", "left", "process")

    def _answer(self, question: int) -> None:
        if (state := self._state()) is not None:
            self.messages.post(state, "answer", question)
