"""Messages between ranks through the store by which they connected.

The store works before the ranks are connected to each other, and while their collectives are stuck.
"""

from __future__ import annotations

import datetime
import pickle
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from minddp.platform import wording

POLL_S = 0.05
FILE_LIMIT_S = 1.0  # for a store whose file a launcher has removed; by default the store waits for half an hour
NO_VALUE = "minddp: no value"


class Messages:
    """The messages of all ranks under one topic of a store.

    Each rank posts its messages under its own rank; any rank reads them. A key has one or more parts. Only `gather`
    and `arrive` wait for other ranks, with a time limit. If the store is gone, every method raises RuntimeError.
    """

    def __init__(self, store: dist.Store, topic: str, rank: int, world_size: int):
        self.store = store
        self.topic = topic
        self.rank = rank
        self.world_size = world_size

    @classmethod
    def open(cls, store: dist.Store, topic: str, rank: int, world_size: int) -> Messages:
        """A topic with a serial number; see `next_serial`."""
        return cls(store, f"{topic}/{next_serial(store, topic, rank)}", rank, world_size)

    def post(self, value: Any, *key: object) -> None:
        """Replaces the message that this rank has posted under `key`, if any."""
        self.store.set(self._name(*key, self.rank), pickle.dumps(value))  # type: ignore[arg-type]  # torch's stub

    def read(self, rank: int, *key: object) -> Any:
        """The message of `rank`, or `None` if there is none now."""
        value = value_now(self.store, self._name(*key, rank))
        return None if value is None else pickle.loads(value)

    def take(self, rank: int, *key: object) -> Any:
        """Read and delete the message of `rank`."""
        if (value := self.read(rank, *key)) is not None:
            self.store.delete_key(self._name(*key, rank))
        return value

    def gather(self, *key: object, limit_s: float, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """The messages of `ranks` (default: all) as soon as all have posted one, or those present at the limit."""
        ranks = range(self.world_size) if ranks is None else ranks
        self._all_posted(*key, limit_s=limit_s, ranks=ranks)
        found = {rank: self.read(rank, *key) for rank in ranks}
        return {rank: value for rank, value in found.items() if value is not None}

    def arrive(self, *key: object, limit_s: float) -> Callable[[float], bool]:
        """Post this rank's arrival. Returns a function that waits up to so many seconds for the other ranks.

        The function returns True once all ranks have arrived. It raises RuntimeError with the absent ranks once
        `limit_s` seconds have passed since this call.
        """
        self.post(True, *key)
        end = time.monotonic() + limit_s

        def all_arrive_within(seconds: float) -> bool:
            left_s = max(0.0, end - time.monotonic())
            if self._all_posted(*key, limit_s=min(seconds, left_s), ranks=range(self.world_size)):
                return True
            absent = [rank for rank in range(self.world_size) if self.read(rank, *key) is None]
            if absent and time.monotonic() >= end:
                raise RuntimeError(f"{wording.subject(absent, 'has', 'have')} not come within {limit_s:g} s.")
            return not absent

        return all_arrive_within

    def settle(self, value: Any, *key: object) -> Any:
        """The first value that any rank has proposed under `key`, which may be this one."""
        proposal: Any = pickle.dumps(value)  # torch's stub knows text only
        return pickle.loads(self.store.compare_set(self._name(*key), "", proposal))

    def settled(self, *key: object) -> Any:
        """The settled value, or `None` if no rank has proposed one."""
        value = value_now(self.store, self._name(*key))
        return None if value is None else pickle.loads(value)

    def count(self, *key: object, add: int = 1) -> int:
        """Add to the counter under `key`, which all ranks share. Returns the sum."""
        return self.store.add(self._name(*key), add)

    def leave(self, *keys: str) -> None:
        """Call this once, after the last use. The last rank deletes everything under `keys`."""
        if self.count("gone") == self.world_size:
            for key in ("gone", *keys):
                self.store.delete_key(self._name(key))
                for rank in range(self.world_size):
                    self.store.delete_key(self._name(key, rank))

    def _all_posted(self, *key: object, limit_s: float, ranks: Sequence[int]) -> bool:
        """Wait until all `ranks` have posted a message, or until the limit."""
        names = [self._name(*key, rank) for rank in ranks]
        deadline = time.monotonic() + limit_s
        while not (all_have := self.store.check(names)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return all_have

    def _name(self, *key: object) -> str:
        return "/".join([self.topic, *map(str, key)])


def next_serial(store: dist.Store, topic: str, rank: int) -> int:
    """1, 2, ... for each call by `rank`: equal on all ranks that call this for `topic` in the same order."""
    return store.add(f"{topic}/opened by {rank}", 1)


def value_now(store: dist.Store, key: str) -> bytes | None:
    """The value under `key`, or `None` if there is none. Another rank may delete the key at any time.

    `get` waits for a key that was deleted after a `check`, or returns an empty value. `compare_set` with an
    expected value that is not empty returns that value for a missing key, and does not create the key.
    """
    value = store.compare_set(key, NO_VALUE, NO_VALUE)
    return None if value == NO_VALUE.encode() else value


def own_connection(store: dist.Store) -> dist.Store:
    """A clone for a thread. If the store is in a file, a missing file is waited for `FILE_LIMIT_S` seconds only."""
    clone: dist.Store = store.clone()  # type: ignore[attr-defined]
    base = clone
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if isinstance(base, dist.FileStore):
        clone.set_timeout(datetime.timedelta(seconds=FILE_LIMIT_S))
    return clone


def connection_for_messages(store: dist.Store) -> dist.Store:
    """The connection of this process for all `Messages` in `store`, in any thread: no call on it waits for a rank.

    A `TCPStore` asks the name server for each new connection, which takes seconds if none answers.
    """
    if store not in _connections:
        _connections[store] = own_connection(store)
    return _connections[store]


_connections: weakref.WeakKeyDictionary[dist.Store, dist.Store] = weakref.WeakKeyDictionary()
