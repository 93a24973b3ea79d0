"""When a waiting rank spins, for how long, and when it stops. By a clock that the tests set."""

from __future__ import annotations

import datetime
import os
from collections import deque
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minddp.platform import acceleration_switch
from minddp.tools.watchdog import WatchedTransport
from minddp.transport import process_group, spin_wait
from minddp.transport.process_group import MAX_SPIN_BYTES, ProcessGroupTransport, _SpinningWork
from minddp.transport.spin_wait import (
    MAX_WAITS_WITHOUT_SPIN,
    PREEMPTED_S,
    SPIN_LIMIT_S,
    SpinWait,
    spin_wait_among,
)
from tests.ranks import on_ranks

POLL_S = PREEMPTED_S / 10  # one poll on a core that no other process wants
GAP_S = 0.003  # a time slice of another process


class Clock:
    """Time goes on by `POLL_S` with each yield, and by `gaps[n]` more in the n-th, counted from 1.

    `ours` is how much of a gap is this process's own work, by another of its threads.
    """

    def __init__(self, gaps: dict[int, float] | None = None, ours: float = 0.0):
        self.now = self.process = 100.0
        self.yields = 0
        self.lock_releases = 0
        self._gaps = gaps or {}
        self._ours = ours

    def sched_yield(self) -> None:
        self.yields += 1
        assert self.yields < 10_000, "it never ends"
        gap = self._gaps.get(self.yields, 0.0)
        self.now += POLL_S + gap
        self.process += POLL_S + self._ours * gap

    def release_interpreter_lock(self, _timeout: int) -> None:
        self.lock_releases += 1

    def put_in(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        times = SimpleNamespace(monotonic=lambda: self.now, process_time=lambda: self.process)
        monkeypatch.setattr(spin_wait, "time", times)
        monkeypatch.setattr(os, "sched_yield", self.sched_yield)
        monkeypatch.setattr(spin_wait, "_release_interpreter_lock", self.release_interpreter_lock)
        return self


class Event:
    """Is over at the n-th poll; `polls` counts them."""

    def __init__(self, over_at: float):
        self.over_at = over_at
        self.polls = 0

    def __call__(self) -> bool:
        self.polls += 1
        return self.polls >= self.over_at


NEVER = float("inf")


def polls_of(ours: SpinWait, over_at: float = NEVER, **limit: float) -> int:
    event = Event(over_at)
    ours.spin(event, **limit)
    return event.polls


def test_a_spin_polls_until_it_is_over_and_yields_its_core_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().put_in(monkeypatch)
    assert polls_of(SpinWait(SPIN_LIMIT_S), over_at=5) == 5
    assert clock.yields == 4
    assert clock.lock_releases == 4  # of the interpreter lock, which sched_yield keeps


@pytest.mark.parametrize(
    ("own_s", "limit_s"), [(0.0, NEVER), (SPIN_LIMIT_S, 0.0), (SPIN_LIMIT_S, -1.0), (0.0, 1.0)]
)
def test_without_time_to_spin_there_is_no_poll(
    monkeypatch: pytest.MonkeyPatch, own_s: float, limit_s: float
) -> None:
    Clock().put_in(monkeypatch)
    assert polls_of(SpinWait(own_s), limit_s=limit_s) == 0


@pytest.mark.parametrize(("own_s", "limit_s"), [(20, NEVER), (20, 1000), (1000, 20)])
def test_the_shorter_limit_counts(monkeypatch: pytest.MonkeyPatch, own_s: float, limit_s: float) -> None:
    clock = Clock().put_in(monkeypatch)
    polls_of(SpinWait(own_s * POLL_S), limit_s=limit_s * POLL_S)
    assert clock.now - 100 == pytest.approx(20 * POLL_S, abs=2 * POLL_S)


def test_a_late_rank_does_not_end_later_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock().put_in(monkeypatch)
    ours = SpinWait(SPIN_LIMIT_S)
    for _ in range(3):
        assert polls_of(ours) > 100


def test_after_each_preemption_twice_as_many_waits_do_not_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(dict.fromkeys(range(1, 1000), GAP_S)).put_in(monkeypatch)
    ours = SpinWait(SPIN_LIMIT_S)
    for asleep in (1, 2, 4, 8, 16, 32, 64, 128, *[MAX_WAITS_WITHOUT_SPIN] * 3):
        assert polls_of(ours) == 1
        yields = clock.yields
        assert [polls_of(ours, over_at=1) for _ in range(asleep)] == [0] * asleep
        assert clock.yields == yields


def test_a_spin_that_succeeds_resets_the_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock({1: GAP_S, 2: GAP_S, 3: GAP_S}).put_in(monkeypatch)
    ours = SpinWait(SPIN_LIMIT_S)
    assert [polls_of(ours) for _ in range(5)] == [1, 0, 1, 0, 0]
    assert polls_of(ours, over_at=1) == 1
    assert [polls_of(ours, over_at=4) for _ in range(4)] == [1, 0, 4, 4]


def test_time_used_by_another_thread_of_this_process_is_no_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock({3: GAP_S}, ours=1.0).put_in(monkeypatch)
    assert polls_of(SpinWait(SPIN_LIMIT_S), over_at=10) == 10


def test_many_short_gaps_are_no_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as interrupts."""
    Clock(dict.fromkeys(range(1, 100), 0.5 * PREEMPTED_S)).put_in(monkeypatch)
    assert polls_of(SpinWait(SPIN_LIMIT_S), over_at=20) == 20


# ------------------------------------------------------------------ which ranks may spin


@pytest.mark.parametrize(
    ("local_world_size", "num_ranks"),
    [("3", 3), ("0", 0), ("", 2), ("-1", 2), ("two", 2), ("1.5", 2), (" ", 2), (None, 2)],
)
@pytest.mark.parametrize("cores", [0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
def test_each_rank_must_have_a_core(
    monkeypatch: pytest.MonkeyPatch, local_world_size: str | None, num_ranks: int, cores: float
) -> None:
    """There are two ranks; LOCAL_WORLD_SIZE may have another number, or no number."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(spin_wait, "usable_cores", lambda: cores)
    if local_world_size is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    assert spin_wait_among(1).limit_s == (SPIN_LIMIT_S if num_ranks <= cores else 0.0)


def test_without_sched_yield_no_rank_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(spin_wait, "usable_cores", lambda: 8.0)
    assert spin_wait_among(1).limit_s == SPIN_LIMIT_S
    monkeypatch.delattr(os, "sched_yield")
    assert spin_wait_among(1).limit_s == 0.0


@pytest.mark.parametrize(("value", "limit_s"), [("off", 0.0), ("on", SPIN_LIMIT_S)])
def test_the_acceleration_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch, value: str, limit_s: float) -> None:
    monkeypatch.setattr(spin_wait, "usable_cores", lambda: 8.0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv(acceleration_switch.VARIABLE, value)
    assert spin_wait_among(1).limit_s == limit_s


@pytest.mark.parametrize(("num_ranks", "limit_s"), [(2, SPIN_LIMIT_S), (3, 0.0)])
def test_without_a_default_group_this_one_has_all_ranks(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, limit_s: float
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(spin_wait, "usable_cores", lambda: 2.0)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert spin_wait_among(num_ranks).limit_s == limit_s


# ------------------------------------------------------------------ waits for a work


class FakeWork:
    """A work of gloo, complete after some polls. Its `wait` must be called, which raises if it has failed."""

    def __init__(self, over_at: float = 3):
        self.event = Event(over_at)
        self.waits: list[Any] = []

    def is_completed(self) -> bool:
        return self.event()

    def get_future(self) -> str:
        return "the future"

    def wait(self, *timeout: datetime.timedelta) -> bool:
        self.waits.append(timeout)
        return True


def spinning_work(work: Any) -> _SpinningWork:
    return _SpinningWork(work, SpinWait(SPIN_LIMIT_S))


def test_a_work_is_polled_and_then_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock().put_in(monkeypatch)
    work = FakeWork()
    spinning_work(work).wait()
    assert (work.event.polls, work.waits) == (3, [()])
    assert spinning_work(work).get_future() == "the future"
    assert spinning_work(work).is_completed()


def test_a_time_limit_holds_for_the_spin_and_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().put_in(monkeypatch)
    limit, work = datetime.timedelta(seconds=10 * POLL_S), FakeWork(NEVER)
    spinning_work(work).wait(limit)
    assert work.waits == [(limit,)]
    assert clock.yields <= 12
    nothing, work = datetime.timedelta(0), FakeWork(NEVER)
    spinning_work(work).wait(nothing)
    assert (work.event.polls, work.waits) == (0, [(nothing,)])


# ------------------------------------------------------------------ real ranks


@on_ranks(2)
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize(("local_world_size", "limit_s"), [("0", SPIN_LIMIT_S), ("100000", 0.0)])
def test_gloos_collectives_are_waited_for_either_way(
    rank: int, local_world_size: str, limit_s: float, limited: bool
) -> None:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=local_world_size):
        transport = ProcessGroupTransport(dist.group.WORLD)
    summed, received = torch.full((3,), rank + 1.0), torch.full((3,), rank + 1.0)
    for work in (transport.all_reduce(summed), transport.broadcast(received, source=1)):
        work.wait(datetime.timedelta(seconds=60)) if limited else work.wait()
        assert work.is_completed()
        assert type(work) is _SpinningWork
    assert transport._spin_wait is not None
    assert transport._spin_wait.limit_s == limit_s
    assert [*summed.tolist(), *received.tolist()] == [3.0] * 3 + [2.0] * 3


@on_ranks(2)
def test_only_waits_for_small_messages_spin(rank: int) -> None:
    """The works of a dense tensor, of one that is too large, and of a sparse one with few rows of many."""
    transport = ProcessGroupTransport(dist.group.WORLD)
    most = MAX_SPIN_BYTES // 4
    rows = torch.sparse_coo_tensor([[0, 1]], torch.ones(2, 8), (most, 8), is_coalesced=True)
    works = [transport.all_reduce(tensor) for tensor in (torch.ones(most), torch.ones(most + 1), rows)]
    for work in works:
        work.wait()
    assert [type(work) is _SpinningWork for work in works] == [True, False, True]


class _Sparse:
    """A message whose values are replaced by gloo's threads once it is in flight."""

    device, dtype, is_sparse = torch.device("cpu"), torch.float32, True

    def __init__(self) -> None:
        self.is_in_flight = False

    def _values(self) -> torch.Tensor:
        assert not self.is_in_flight, "gloo's threads use it"
        return torch.ones(2)

    def numel(self) -> int:
        assert not self.is_in_flight, "gloo's threads use it"
        return 2


def test_no_message_in_flight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(_group: object, message: Any, *_options: object) -> SimpleNamespace:
        (message[0] if isinstance(message, list) else message).is_in_flight = True
        return SimpleNamespace(wait=None, is_completed=None, get_future=None)

    monkeypatch.setattr(process_group, "_Group", SimpleNamespace(allreduce=send, broadcast=send))
    transport = ProcessGroupTransport.__new__(ProcessGroupTransport)
    transport.group, transport._is_python_group = cast("dist.ProcessGroup", None), False
    transport._spin_wait = SpinWait(SPIN_LIMIT_S)
    watched = WatchedTransport.__new__(WatchedTransport)
    vars(watched)["_inquiry"] = None
    watched._transport, watched._number, watched._recent, watched._stuck = transport, 0, deque(), ""
    for over in (transport, watched):
        reduced, received = (cast("torch.Tensor", _Sparse()) for _ in range(2))
        over.all_reduce(reduced)
        over.broadcast(received, 0)
    assert watched._number == 2
