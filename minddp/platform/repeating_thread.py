"""A thread that repeats a call, and ends before the interpreter does."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

_log = logging.getLogger(__name__)
AT_EXIT_S = 10.0  # to wait for a turn at exit: a thread that is inside the store then aborts the process


class RepeatingThread:
    """Calls `turn(False)` every `every_s` seconds, and `turn(True)` once, after `close` or at exit.

    A RuntimeError of a turn ends the thread silently: the store is gone, so the job is over.
    """

    def __init__(self, turn: Callable[[bool], None], every_s: float, name: str):
        self.closing = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(turn, every_s), name=name, daemon=True)
        self._at_exit = weakref.finalize(self, _end, self.closing, self._thread)
        self._thread.start()

    def close(self, limit_s: float = 1.0) -> None:
        """Wait for the last turn, but at most `limit_s` seconds. May be called again."""
        self.closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(limit_s)

    def _run(self, turn: Callable[[bool], None], every_s: float) -> None:
        try:
            while not self.closing.wait(every_s):
                turn(False)
            turn(True)
        except RuntimeError:
            pass
        except Exception:
            _log.warning("The thread `%s` has failed and has ended.", self._thread.name, exc_info=True)
        finally:
            self._at_exit.detach()


def _end(closing: threading.Event, thread: threading.Thread) -> None:
    closing.set()
    thread.join(AT_EXIT_S)
