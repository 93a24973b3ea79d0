"""Notes of ranks in a store, which other ranks delete at any moment."""

from __future__ import annotations

import datetime
import subprocess
import sys
from typing import Any

import torch.distributed as dist

from minddp.tools.watchdog.board import Board


class DeletedAfterEachCall:
    """A store of which another rank deletes `key` after each call of this one."""

    def __init__(self, store: dist.Store, key: str):
        self._store, self._key = store, key

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            try:
                return getattr(self._store, name)(*args)
            finally:
                self._store.delete_key(self._key)

        return call


def test_a_note_that_another_rank_deletes_is_not_waited_for() -> None:
    """The guard's thread would wait in the store when the interpreter ends, which that crashes."""
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=0.1))
    board = Board(store, 1)
    board.open("test")
    board.write({"step": 3}, "notes", 1)
    board.store = DeletedAfterEachCall(board.store, board.key("notes", 1))  # type: ignore[assignment]
    assert board.read("notes", 1) == {"step": 3}
    assert board.read("notes", 1) is None


LONG_TURN = """
import time, torch.distributed as dist
from minddp.tools.watchdog.board import Board

def turn(is_last):
    time.sleep(1.5)  # as many calls of a store that is busy
    board.store.add("turns", 1)
    print("over" if is_last else "", flush=True)

board = Board(dist.HashStore(), 0)
board.open("test")
board.start(turn, 0.01, "test")
"""


def test_the_interpreter_waits_for_the_last_turn_before_it_ends() -> None:
    done = subprocess.run([sys.executable, "-c", LONG_TURN], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["over"], "")
