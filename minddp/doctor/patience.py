"""Waiting from outside: for calls that may never return, whatever time limit they were given.

Connecting to a store, resolving a name, connecting gloo's pairs: each has been seen to outlast its own time limit,
or has none. So they run in a thread that can be left behind. A process with such a thread should end by `os._exit`:
an orderly end would wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")
LOOK_UP_EVERY_S = 0.1


class TimeUp(Exception):
    """It did not return in time."""


class Abandoned(Exception):
    """It is of no use to wait for it any longer."""


def patiently(call: Callable[[], T], timeout_s: float, useless: Callable[[], bool] = lambda: False) -> T:
    """What `call` returns or raises, if it does so within `timeout_s` and before `useless` becomes true.

    Raises:
        TimeUp, Abandoned: it did not. The thread that it runs in is left behind.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    deadline = time.monotonic() + timeout_s
    threading.Thread(target=run, name="minddp doctor waits for this", daemon=True).start()
    while True:
        if wait([future], min(LOOK_UP_EVERY_S, max(0.0, deadline - time.monotonic()))).done:
            return future.result()
        if time.monotonic() >= deadline:
            raise TimeUp(f"no end within {timeout_s:g} s")
        if useless():
            raise Abandoned
