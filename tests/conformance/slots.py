"""Room for so many jobs at once, shared by processes that may be killed."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

_POLL_S = 0.02


class Slots:
    """`count` slots; byte i of the file at `path` is slot i, held by the process that has locked it.

    Record locks belong to the process: forks do not inherit them, and the kernel releases them when the
    process ends in any way. A semaphore would stay decremented, and all others would wait for ever.
    """

    def __init__(self, path: Path, count: int):
        self._file = path.open("ab")
        self._count = count
        self._held: set[int] = set()

    def take(self) -> int | None:
        """A free slot, if there is one."""
        for slot in set(range(self._count)) - self._held:  # one's own lock would be granted again
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
            except OSError:
                continue
            self._held.add(slot)
            return slot
        return None

    def wait(self) -> int:
        """The next slot that is free. Others hold theirs no longer than one test may take."""
        while (slot := self.take()) is None:
            time.sleep(_POLL_S)
        return slot

    def give_back(self, slot: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, slot)
        self._held.remove(slot)
