"""The ranks hear from each other through the store, while what they wait for does not come.

A rank that has waited too long asks: it counts up a number in the store. On every rank a thread looks at that
number about once a second, and when it has changed, puts its rank's state there. The thread does nothing else,
so it also answers for a main thread that sleeps, computes or waits. A rank that does not answer has ended, or
its host is out of reach; on the same host the process table tells which.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from minddp.watchdog.diagnosis import Answers
from minddp.watchdog.rank_state import RankState

LOOK_EVERY_S = 1.0
PATIENCE_S = 3 * LOOK_EVERY_S  # for answers


class Lookout:
    """Answers for one rank from now until `close`, and asks the others.

    `say` makes the rank's state, `None` if there is nothing to tell of any more; it is called from the lookout's
    thread and holds no reference to what it tells of. All ranks of a group make their lookouts in one order.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, say: Callable[[], RankState | None]):
        self._store = store.clone()  # type: ignore[attr-defined]
        self._name = f"minddp/lookout/{self._store.add(f'minddp/lookouts of {rank}', 1)}"
        self._rank = rank
        self._world_size = world_size
        self._say = say
        self._closing = threading.Event()
        self._store.set(self._key("home", rank), f"{socket.gethostname()}/{os.getpid()}")
        self._thread = threading.Thread(target=self._look, name=self._name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave a last word, and stop answering. May be called twice.

        A thread that is inside the store while the interpreter goes down would take it down with a crash.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(LOOK_EVERY_S)
        with contextlib.suppress(RuntimeError):  # the store may have gone first
            state = self._say()
            self._store.set(self._key("left", self._rank), state.to_json() if state else "")

    def ask(self) -> Answers:
        """What all ranks say of themselves, or what else is known of them after `PATIENCE_S` seconds."""
        question = self._store.add(self._key("asked"), 1)
        self._answer(question)
        present: dict[int, RankState] = {}
        absent: dict[int, _Absence] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(present) + len(absent) < self._world_size:
            time.sleep(0.05)
            for rank in sorted(set(range(self._world_size)) - present.keys() - absent.keys()):
                answer = self._read(self._key("answer", question, rank))
                if answer:
                    present[rank] = RankState.from_json(answer)
                elif (absence := self._absence(rank)) is not None:
                    absent[rank] = absence
                elif time.monotonic() > deadline:
                    absent[rank] = _Absence("silent")
        return Answers(
            present={rank: present[rank] for rank in sorted(present)},
            silent=[rank for rank, absence in absent.items() if absence.kind == "silent"],
            exited=[rank for rank, absence in absent.items() if absence.kind == "exited"],
            left=[rank for rank, absence in absent.items() if absence.kind == "left"],
            last_words={rank: absence.last for rank, absence in absent.items() if absence.last is not None},
        )

    def _absence(self, rank: int) -> _Absence | None:
        """How a rank is known to be gone, if it is. Of processes on other hosts only last words are known."""
        left = self._read(self._key("left", rank))
        last = RankState.from_json(left) if left else None
        if self._has_exited(rank):
            return _Absence("exited", last)
        return None if left is None else _Absence("left", last)

    def _has_exited(self, rank: int) -> bool:
        home = self._read(self._key("home", rank))
        host, _, pid = (home or "").rpartition("/")
        return host == socket.gethostname() and not _is_running(int(pid))

    def _look(self) -> None:
        answered = 0
        with contextlib.suppress(RuntimeError):  # the store has gone: the job is over
            while not self._closing.wait(LOOK_EVERY_S):
                asked = self._store.add(self._key("asked"), 0)
                for question in range(answered + 1, asked + 1):
                    self._answer(question)
                answered = asked

    def _answer(self, question: int) -> None:
        state = self._say()
        if state is not None:
            self._store.set(self._key("answer", question, self._rank), state.to_json())

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _key(self, *parts: object) -> str:
        return "/".join([self._name, *map(str, parts)])


@dataclass(frozen=True)
class _Absence:
    """Why a rank does not answer, and its last word."""

    kind: Literal["silent", "exited", "left"]
    last: RankState | None = None


def _is_running(pid: int) -> bool:
    """Whether a process of this host exists, and is more than an entry that nobody has collected yet."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return status not in ("Z", "X")
    except OSError:
        pass  # no such process, or no such file system
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
