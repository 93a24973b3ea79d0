"""A time limit for calls that have none of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.1


class Unfinished(Exception):
    """A call did not return within its time limit, or its result is no longer needed."""


def call_with_limit(call: Callable[[], T], limit_s: float, useless_because: Callable[[], str] = lambda: "") -> T:
    """The result or error of `call`, unless it outlasts `limit_s` or `useless_because()` returns a reason.

    For calls that have no time limit or have been seen to exceed it: name resolution, TCPStore, connecting by gloo
    or NCCL. The call runs in a daemon thread that may stay behind; a process with such a thread has to end by
    `os._exit`.

    Raises:
        Unfinished: the call has not returned.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    deadline = time.monotonic() + limit_s
    threading.Thread(target=run, name="minddp: call with a time limit", daemon=True).start()
    while not wait([future], min(POLL_S, max(0.0, deadline - time.monotonic()))).done:
        if time.monotonic() >= deadline:
            raise Unfinished(f"timed out after {limit_s:g} s")
        if reason := useless_because():
            raise Unfinished(reason)
    return future.result()
