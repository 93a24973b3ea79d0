"""Shared by the tests and pages of this folder: ranks for one run, the log of a rank, and the end of a guard."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import minddp
from minddp.tools.watchdog import comparison
from tests.ranks import RankPool

DOCS = Path(__file__).parents[3] / "docs"
LIMIT_S = 180.0


def run_apart(world_size: int, function: Any, *args: Any, timeout_s: float = LIMIT_S, **pool: Any) -> list[Any]:
    """The results of `function` on ranks that are started for it and end with it."""
    ranks = RankPool(world_size, **pool)
    try:
        return ranks.run(function, *args, timeout_s=timeout_s)
    finally:
        ranks.kill()


class Logged(list[str]):
    """The messages that a rank has logged, and the seconds after which it did."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.seconds = time.monotonic(), list[float]()

    def emit(self, record: logging.LogRecord) -> None:
        self.seconds.append(time.monotonic() - self.began)
        self.append(record.getMessage())


@contextlib.contextmanager
def reports() -> Iterator[Logged]:
    """Collect the messages that this rank's watchdog logs within."""
    logged, handler = Logged(), logging.Handler()
    handler.emit = logged.emit  # type: ignore[method-assign]
    log = logging.getLogger("minddp.tools.watchdog")
    log.addHandler(handler)
    try:
        yield logged
    finally:
        log.removeHandler(handler)


def patiently() -> Any:
    """The last exchange of notes waits for threads that have to wait for a core."""
    return mock.patch.object(comparison, "LAST_S", 30.0)


def close(ddp: minddp.DistributedDataParallel) -> None:
    assert ddp.guard is not None
    with patiently():
        ddp.guard.close()


def wait_until(is_true: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.01)
