from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from minddp.core.events import EventKind
from minddp.platform import streams
from minddp.tools.xray import host
from minddp.tools.xray.host import FETCHING, SCHEDULED, WAITING, CoreClock, CoreTime, CoreWatch, HostWait, HostWatch


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


@contextmanager
def watched() -> Iterator[list[EventKind]]:
    seen: list[EventKind] = []
    watch = HostWatch(seen.append)
    watch.start()
    try:
        yield seen
    finally:
        watch.stop()


def test_each_batch_is_reported_and_the_end_of_the_data_too() -> None:
    with watched() as seen:
        batches = list(DataLoader(Numbers(), batch_size=2))
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3]]
    fetches = 1 + 2 + 1  # the iterator is made, two batches, the end
    assert seen == [EventKind.DATA_BEGIN, EventKind.DATA_END] * fetches


def test_other_threads_are_not_reported() -> None:
    with watched() as seen:
        thread = threading.Thread(target=lambda: list(DataLoader(Numbers())))
        thread.start()
        thread.join(10)
    assert not thread.is_alive()
    assert not seen


def test_two_end_in_the_order_in_which_they_began() -> None:
    before = [getattr(owner, name) for owner, name in FETCHING]
    seen: tuple[list[EventKind], list[EventKind]] = ([], [])
    first, second = (HostWatch(events.append) for events in seen)
    first.start()
    second.start()
    iter(DataLoader(Numbers()))
    first.stop()
    iter(DataLoader(Numbers()))
    second.stop()
    assert seen == ([EventKind.DATA_BEGIN, EventKind.DATA_END], [EventKind.DATA_BEGIN, EventKind.DATA_END] * 2)
    assert [getattr(owner, name) for owner, name in FETCHING] == before
    assert not set(WAITING) & set(vars(torch.Tensor))


def test_torch_is_as_before_afterwards() -> None:
    before = [getattr(owner, name) for owner, name in FETCHING]
    with watched():
        assert [getattr(owner, name) for owner, name in FETCHING] != before
        assert set(WAITING) <= set(vars(torch.Tensor))
    assert [getattr(owner, name) for owner, name in FETCHING] == before
    assert not set(WAITING) & set(vars(torch.Tensor))


def test_waits_for_a_device_are_added_up_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "has_streams", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "item", lambda self: time.sleep(0.003), raising=False)
    watch = HostWatch(lambda kind: None)
    watch.start()
    for _ in range(2):
        torch.ones(1).item()
    assert bool(torch.ones(1))
    longest, other = watch.stop()
    assert longest.where.startswith(".<lambda>() at test_host.py:")
    assert longest.times == 2
    assert longest.ns >= 6_000_000
    assert other.where.startswith(".__bool__() at test_host.py:")


def test_nothing_waits_on_the_cpu() -> None:
    watch = HostWatch(lambda kind: None)
    watch.start()
    assert torch.ones(1).item() == 1.0
    assert watch.stop() == ()


def test_a_wait_is_plain_data() -> None:
    assert HostWait(*HostWait(".item() at train.py:3", 2, 10)) == HostWait(".item() at train.py:3", 2, 10)


# ---------------------------------------------------------------------- cores

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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = iter(times)
    monkeypatch.setattr(CoreClock, "read", lambda _clock: CoreTime(*next(script)))
    watch = CoreWatch()
    for kind in kinds:
        watch.see(kind)
    assert watch.medians_ns() == medians_ns


SHARE_A_CORE = """
import os, time
from minddp.tools.xray.host import CoreClock
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
    monkeypatch.setattr(host, "SCHEDULED", tmp_path / "missing")
    clock = CoreClock()
    begin = clock.read()
    sum(range(100_000))
    passed = clock.read().since(begin)
    assert passed.had_ns > 0
    assert passed.waited_ns == 0
