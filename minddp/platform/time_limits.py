"""Time limits for what has none of its own: calls, and waits for keys of a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")
POLL_S = 0.05
NO_VALUE = "minddp: no value"


class Unfinished(Exception):
    """A call did not return within its time limit, or its result is no longer needed."""


def call_with_limit(call: Callable[[], T], limit_s: float, useless_because: Callable[[], str] = lambda: "") -> T:
    """The result or error of `call`, unless it outlasts `limit_s` or there is a reason why it is useless.

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
    while not wait([future], min(2 * POLL_S, max(0.0, deadline - time.monotonic()))).done:
        if time.monotonic() >= deadline:
            raise Unfinished(f"timed out after {limit_s:g} s")
        if reason := useless_because():
            raise Unfinished(reason)
    return future.result()


def values_within(store: dist.Store, key_of_rank: Mapping[int, str], limit_s: float) -> dict[int, bytes]:
    """The values under these keys, as soon as all are set; those that are set after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not store.check(list(key_of_rank.values())) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    found = {rank: value_now(store, key) for rank, key in key_of_rank.items()}
    return {rank: value for rank, value in found.items() if value is not None}


def value_now(store: dist.Store, key: str) -> bytes | None:
    """The value under `key`, or `None` if there is none. Another rank may delete the key at any time.

    `get` waits for a key that was deleted after a `check`, or returns an empty value. To compare a missing key with
    text that is not empty returns that text, and makes no key.
    """
    value = store.compare_set(key, NO_VALUE, NO_VALUE)
    return None if value == NO_VALUE.encode() else value
