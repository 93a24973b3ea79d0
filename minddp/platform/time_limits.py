"""A time limit for calls that have none of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def call_with_limit(call: Callable[[], T], limit_s: float) -> T:
    """The result or error of `call`, unless it outlasts `limit_s`.

    For calls that have no time limit or have been seen to exceed it: name resolution, TCPStore, connecting by gloo
    or NCCL. The call runs in a daemon thread that may stay behind; a process with such a thread has to end by
    `os._exit`.

    Raises:
        TimeoutError: the call has not returned.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="minddp: call with a time limit", daemon=True).start()
    if not wait([future], limit_s).done:
        raise TimeoutError(f"timed out after {limit_s:g} s")
    return future.result()
