"""The ranks exchange their states through the store while a collective does not complete.

A rank that has waited too long asks: it increments a number in the store. On every rank a thread reads that number
about once a second, and when it has changed, writes the rank's state to the store. The thread does nothing else, so
it also answers for a main thread that sleeps, computes or waits. A rank that does not answer has ended, or its host
is out of reach; on the same host the process table shows which.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from minddp.platform.host import host_identity
from minddp.watchdog.diagnosis import Absence, Answers
from minddp.watchdog.rank_state import RankState

READ_EVERY_S = 1.0
ANSWER_LIMIT_S = 3 * READ_EVERY_S


class Inquiry:
    """Answers for one rank until `close`, and asks the others.

    `state` makes the rank's state, `None` if its module is gone; the thread calls it, so it must hold no reference
    to the module. All ranks of a group make their inquiries in one order.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, state: Callable[[], RankState | None]):
        self._store = store.clone()  # type: ignore[attr-defined]
        self._name = f"minddp/watchdog/{self._store.add(f'minddp/watchdogs of {rank}', 1)}"
        self._rank = rank
        self._world_size = world_size
        self._state = state
        self._closing = threading.Event()
        self._store.set(self._key("process", rank), f"{host_identity('pid')}/{os.getpid()}")
        self._thread = threading.Thread(target=self._answer_questions, name=self._name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave the last state behind, and stop answering. May be called twice.

        A thread that is inside the store while the interpreter shuts down would crash it.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(READ_EVERY_S)
        with contextlib.suppress(RuntimeError):  # the store may have ended before
            state = self._state()
            self._store.set(self._key("left", self._rank), state.to_json() if state else "")

    def ask(self) -> Answers:
        """The states of all ranks, or why there is none after `ANSWER_LIMIT_S` seconds."""
        question = self._store.add(self._key("asked"), 1)
        self._answer(question)
        present: dict[int, RankState] = {}
        absent: dict[int, Absence] = {}
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while pending := set(range(self._world_size)) - present.keys() - absent.keys():
            time.sleep(0.05)
            for rank in pending:
                if answer := self._read(self._key("answer", question, rank)):
                    present[rank] = RankState.from_json(answer)
                elif absence := self._absence(rank):
                    absent[rank] = absence
                elif time.monotonic() > deadline:
                    absent[rank] = Absence("silent")
        return Answers(dict(sorted(present.items())), dict(sorted(absent.items())))

    def _absence(self, rank: int) -> Absence | None:
        """The known reason for which a rank cannot answer. A process on another host is known only to have left."""
        left = self._read(self._key("left", rank))
        last = RankState.from_json(left) if left else None
        process_table, _, pid = (self._read(self._key("process", rank)) or "").rpartition("/")
        if process_table == host_identity("pid") and not _is_running(int(pid)):
            return Absence("exited", last)
        return None if left is None else Absence("left", last)

    def _answer_questions(self) -> None:
        answered = 0
        with contextlib.suppress(RuntimeError):  # the store has ended: the job is over
            while not self._closing.wait(READ_EVERY_S):
                asked = self._store.add(self._key("asked"), 0)
                for question in range(answered + 1, asked + 1):
                    self._answer(question)
                answered = asked

    def _answer(self, question: int) -> None:
        state = self._state()
        if state is not None:
            self._store.set(self._key("answer", question, self._rank), state.to_json())

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _key(self, *parts: object) -> str:
        return "/".join([self._name, *map(str, parts)])


def _is_running(pid: int) -> bool:
    """True if the process exists, and is more than an entry that its parent has not collected yet."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except ProcessLookupError:
        return False
    except OSError:  # another user's process, or a system without /proc
        return True
