from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from minddp.core.events import EventKind
from minddp.tools.xray import core_time
from minddp.tools.xray.core_time import SCHEDULED, CoreClock, CoreTime, costs_ns

FORWARD, BACKWARD, END = EventKind.FORWARD_BEGIN, EventKind.BACKWARD_BEGIN, EventKind.GRADIENTS_COMPLETE
LAUNCH = (EventKind.BUCKET_LAUNCHED, EventKind.LAUNCH_END)


@pytest.mark.parametrize(
    ("kinds", "times", "medians_ns"),
    [
        ((), (), (0, 0)),
        ((*LAUNCH, *LAUNCH, *LAUNCH), ((0, 0), (3, 9), (10, 9), (15, 9), (20, 9), (29, 9)), (5, 0)),
        ((FORWARD, BACKWARD, END), ((0, 0), (10, 5), (30, 15)), (0, 0)),  # waits as long as forward does
        ((FORWARD, BACKWARD, END), ((0, 0), (10, 5), (30, 40)), (0, 25)),
        ((FORWARD, BACKWARD, END), ((0, 0), (10, 0), (30, 7)), (0, 7)),
        ((FORWARD, BACKWARD, END), ((0, 0), (10, 90), (30, 91)), (0, 0)),
        ((BACKWARD, END, LAUNCH[1]), ((0, 0), (10, 5), (20, 5)), (0, 0)),  # begun in the middle
    ],
)
def test_what_messages_take_from_a_core(
    kinds: Sequence[EventKind],
    times: Sequence[tuple[int, int]],
    medians_ns: tuple[float, float],
) -> None:
    assert costs_ns(zip(kinds, [CoreTime(*time) for time in times], strict=True)) == medians_ns


SHARE_A_CORE = """
import os, time
from minddp.tools.xray.core_time import CoreClock
core = min(os.sched_getaffinity(0))
children = [os.fork() for _ in range(1)]
os.sched_setaffinity(0, {core})
end = time.monotonic() + 0.4
if children[0] == 0:
    while time.monotonic() < end: pass
    os._exit(0)
clock = CoreClock()
begin = clock.read()
while time.monotonic() < end: pass
waited = clock.read().since(begin)
os.waitpid(children[0], 0)
print(waited.had_ns, waited.waited_ns)
"""


@pytest.mark.skipif(not SCHEDULED.exists(), reason="only Linux counts for how long a thread waits for a core")
def test_a_thread_that_shares_its_core_waits_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", SHARE_A_CORE], capture_output=True, text=True, timeout=60)
    had_ns, waited_ns = map(int, done.stdout.split())
    assert had_ns > 10_000_000, done.stderr
    assert waited_ns > 0.25 * had_ns


def test_where_waits_are_not_counted_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(core_time, "SCHEDULED", tmp_path / "missing")
    clock = CoreClock()
    begin = clock.read()
    sum(range(100_000))
    passed = clock.read().since(begin)
    assert passed.had_ns > 0
    assert passed.waited_ns == 0
