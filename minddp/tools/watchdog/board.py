"""Ranks leave notes for each other in the store through which they connected, also while collectives are stuck."""

from __future__ import annotations

import datetime
import logging
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from minddp.platform.store import value_now

_log = logging.getLogger(__name__)
AT_EXIT_S = 10.0  # for a turn to end: a thread that is inside the store then aborts the process
FILE_LIMIT_S = 1.0  # a store's file that a launcher has removed is waited for, by default for half an hour


class Board:
    """Values under the keys of a store that begin with a name, and a thread of this rank that looks after them.

    It ends before the interpreter. All but `close` raise RuntimeError if the store has ended.
    """

    def __init__(self, store: dist.Store, rank: int):
        self.closing = threading.Event()
        self.store = store
        self._rank = rank
        self._thread: threading.Thread | None = None

    def open(self, name: str) -> None:
        """All ranks open boards of one name in one order."""
        self.store = self.store.clone()  # type: ignore[attr-defined]
        if _is_in_a_file(self.store):
            self.store.set_timeout(datetime.timedelta(seconds=FILE_LIMIT_S))  # of this clone alone
        self.name = f"{name}/{self.store.add(f'{name}/opened by {self._rank}', 1)}"

    def start(self, turn: Callable[[bool], None], every_s: float, thread_name: str) -> None:
        """Call `turn(False)` in a thread, again and again, and `turn(True)` once the board is closed."""
        self._thread = threading.Thread(target=self._run, args=(turn, every_s), name=thread_name, daemon=True)
        self._at_exit = weakref.finalize(self, _end, self.closing, self._thread)
        self._thread.start()

    def close(self, limit_s: float = 1.0) -> None:
        """Wait for the last turn, but no longer. May be called twice."""
        self.closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(limit_s)

    def _run(self, turn: Callable[[bool], None], every_s: float) -> None:
        try:
            while not self.closing.wait(every_s):
                turn(False)
            turn(True)
        except RuntimeError:
            pass  # the store has ended: the job is over
        except Exception:
            _log.warning("The watchdog has failed, and looks for nothing from now on.", exc_info=True)
        finally:
            self._at_exit.detach()

    def read(self, *key: object) -> Any:
        """`None` if there is no value."""
        value = value_now(self.store, self.key(*key))
        return None if value is None else pickle.loads(value)

    def write(self, value: Any, *key: object) -> None:
        self.store.set(self.key(*key), pickle.dumps(value))  # type: ignore[arg-type]  # torch's stub

    def write_first(self, value: str, *key: object) -> str:
        """The text there, which is `value` if there was none."""
        return self.store.compare_set(self.key(*key), "", value).decode()

    def delete(self, *key: object) -> None:
        self.store.delete_key(self.key(*key))

    def leave(self, world_size: int, keys: Iterable[tuple[object, ...]]) -> None:
        """Once, after the last use. The last rank deletes `keys`: a process may wrap hundreds of modules."""
        if self.add(1, "gone") == world_size:
            for key in (*keys, ("gone",)):
                self.delete(*key)

    def add(self, number: int, *key: object) -> int:
        """The sum of all that has been added there."""
        return self.store.add(self.key(*key), number)

    def key(self, *parts: object) -> str:
        return "/".join([self.name, *map(str, parts)])


def _end(closing: threading.Event, thread: threading.Thread) -> None:
    closing.set()
    thread.join(AT_EXIT_S)


def _is_in_a_file(store: dist.Store) -> bool:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)
