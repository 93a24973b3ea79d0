"""A thread that ends before the interpreter."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from minddp.platform.repeating_thread import RepeatingThread

LONG_TURN = """
import time, torch.distributed as dist
from minddp.platform.repeating_thread import RepeatingThread

store = dist.HashStore()

def turn(is_last):
    time.sleep(1.5)  # as many calls of a store that is busy
    store.add("turns", 1)
    print("over" if is_last else "", flush=True)

RepeatingThread(turn, 0.01, "test")
"""


def test_the_interpreter_waits_for_the_last_turn_before_it_ends() -> None:
    done = subprocess.run([sys.executable, "-c", LONG_TURN], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["over"], "")


@pytest.mark.parametrize(("error", "logged"), [(RuntimeError, []), (KeyError, ["The thread `test` has failed"])])
def test_only_a_store_that_has_ended_ends_the_thread_silently(
    error: type[Exception], logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def turn(is_last: bool) -> None:
        raise error

    with caplog.at_level(logging.WARNING):
        RepeatingThread(turn, 0.0, "test").close(10.0)
    assert [record.getMessage()[:28] for record in caplog.records] == logged
