"""Reads and waits in the store through which the ranks have connected: each has a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch.distributed as dist

from minddp.platform import wording

POLL_S = 0.05
NO_VALUE = "minddp: no value"


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


def gathering(store: dist.Store, key: str, rank: int, world_size: int, limit_s: float) -> Callable[[float], bool]:
    """Count this rank at `key`, once. Returns a function that waits for so many seconds: True once all are counted.

    It raises RuntimeError once `limit_s` seconds have passed since this call.
    """
    if store.add(f"{key} by {rank}", 1) == 1:  # a rank whose wait was interrupted comes again
        store.add(key, 1)
    end = time.monotonic() + limit_s

    def all_come_within(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while store.add(key, 0) < world_size:
            if time.monotonic() >= end:
                absent = [other for other in range(world_size) if not store.check([f"{key} by {other}"])]
                raise RuntimeError(f"{wording.subject(absent, 'has', 'have')} not come within {limit_s:g} s.")
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    return all_come_within
