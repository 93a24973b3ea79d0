"""What minddp logs while a block runs, in a test or on a rank."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager


class Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    """The messages, in order."""
    collector, logger = Collector(), logging.getLogger("minddp")
    logger.addHandler(collector)
    try:
        yield collector.texts
    finally:
        logger.removeHandler(collector)


@contextmanager
def must_log(pattern: str) -> Iterator[None]:
    """Fails unless some message matches."""
    with logged() as texts:
        yield
    assert any(re.search(pattern, text) for text in texts), f"{pattern!r} is not in {texts}"
