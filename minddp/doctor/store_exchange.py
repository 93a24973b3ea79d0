"""Messages between ranks through the store, before the ranks are connected to each other.

A message is JSON under a topic and a rank. Every wait has a time limit; a rank that posts nothing shows as missing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
POLL_S = 0.05
FAREWELL_S = 5.0  # how long a rank that has failed waits for the outcomes of the others
SILENT = "no answer"
GAVE_UP = "gave up because another rank had failed"


class Unfinished(Exception):
    """A call did not return within its time limit, or its result is no longer needed."""


class StoreLost(RuntimeError):
    """The store does not answer: the process that hosts it has ended."""


def call_with_limit(call: Callable[[], T], limit_s: float, is_useless: Callable[[], bool] = lambda: False) -> T:
    """The result or error of `call`, unless it outlasts `limit_s` or `is_useless()` becomes true.

    For calls that have no time limit or have been seen to exceed it: name resolution, TCPStore, gloo's connections.
    The call runs in a daemon thread that may stay behind; a process with such a thread has to end by `os._exit`.

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
    threading.Thread(target=run, name="minddp doctor: call with a time limit", daemon=True).start()
    while not wait([future], min(2 * POLL_S, max(0.0, deadline - time.monotonic()))).done:
        if time.monotonic() >= deadline:
            raise Unfinished(f"timed out after {limit_s:g} s")
        if is_useless():
            raise Unfinished(GAVE_UP)
    return future.result()


def first_line(error: BaseException) -> str:
    """The message without the C++ stack that torch appends."""
    return str(error).strip().partition("\n")[0]


@dataclass(frozen=True)
class StoreExchange:
    """One rank's access to the messages of all ranks. Every method raises StoreLost if the store is gone."""

    store: dist.Store
    rank: int
    world_size: int

    def post(self, topic: str, value: Any) -> None:
        self._access(lambda: self.store.set(f"{topic}/{self.rank}", json.dumps(value)))

    def gather(self, topic: str, limit_s: float, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """The messages that `ranks` (default: all) have posted within the time limit."""
        deadline = time.monotonic() + limit_s
        missing = list(range(self.world_size) if ranks is None else ranks)
        received: dict[int, Any] = {}
        while True:
            received |= {rank: self._read(topic, rank) for rank in missing if self._is_set(f"{topic}/{rank}")}
            missing = [rank for rank in missing if rank not in received]
            if not missing or time.monotonic() >= deadline:
                return dict(sorted(received.items()))
            time.sleep(POLL_S)

    def run_on_all(
        self, topic: str, part: Callable[[], Any], limit_s: float
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """Run `part` on every rank, until one fails; every rank gets the JSON values and the errors by rank.

        Only the errors to look at first: a silent rank makes others fail, and a failed rank makes others give up.
        """
        value, error = None, ""
        try:
            value = call_with_limit(part, limit_s, lambda: self._is_set(f"{topic}/failed"))
        except StoreLost:
            raise
        except Unfinished as unfinished:
            error = str(unfinished)
        except Exception as raised:
            error = f"{type(raised).__name__}: {first_line(raised)}"
        if error not in ("", GAVE_UP):
            self._access(lambda: self.store.set(f"{topic}/failed", "1"))
        self.post(topic, [value, error])
        received = self.gather(topic, FAREWELL_S if error else limit_s + 1)
        values = {rank: value for rank, (value, error) in received.items() if not error}
        errors = {rank: error for rank, (_, error) in received.items() if error not in ("", GAVE_UP)}
        return values, {rank: SILENT for rank in range(self.world_size) if rank not in received} or errors

    def _read(self, topic: str, rank: int) -> Any:
        return json.loads(self._access(lambda: self.store.get(f"{topic}/{rank}")))

    def _is_set(self, key: str) -> bool:
        return self._access(lambda: self.store.check([key]))

    def _access(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except RuntimeError as error:
            raise StoreLost(first_line(error)) from error
