"""Who stays awake while it waits, for how long, and when that is given up. By a clock that the tests set."""

from __future__ import annotations

import datetime
import os
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from minddp.transport import awake, process_group
from minddp.transport.process_group import LARGEST_AWAKE_BYTES, ProcessGroupTransport, _AwakeWork
from minddp.transport.shared_memory.exchange import Exchange
from minddp.transport.spin_wait import AWAKE_S, MOST_WAITS_ASLEEP, TAKEN_S, Wakefulness, wakefulness
from minddp.watchdog import WatchedTransport
from tests.transport.threads import TIMEOUT_S, connected

LOOK_S = TAKEN_S / 10  # what one look takes on a core that nobody else wants
GAP_S = 0.003  # a slice of somebody else


class Clock:
    """Time goes on by `LOOK_S` with each yield, and by `gaps[n]` more in the n-th, counted from 1.

    `ours` is how much of a gap is this process's own work, by another of its threads.
    """

    def __init__(self, gaps: dict[int, float] | None = None, ours: float = 0.0):
        self.now = self.process = 100.0
        self.yields = 0
        self.lets_go = 0
        self._gaps = gaps or {}
        self._ours = ours

    def sched_yield(self) -> None:
        self.yields += 1
        assert self.yields < 10_000, "it never ends"
        gap = self._gaps.get(self.yields, 0.0)
        self.now += LOOK_S + gap
        self.process += LOOK_S + self._ours * gap

    def let_other_threads_run(self, _timeout: int) -> None:
        self.lets_go += 1

    def put_in(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        times = SimpleNamespace(monotonic=lambda: self.now, process_time=lambda: self.process)
        monkeypatch.setattr(awake, "time", times)
        monkeypatch.setattr(os, "sched_yield", self.sched_yield)
        monkeypatch.setattr(awake, "_let_other_threads_run", self.let_other_threads_run)
        return self


class Event:
    """Is over at the n-th look; `looks` counts them."""

    def __init__(self, over_at: float):
        self.over_at = over_at
        self.looks = 0

    def __call__(self) -> bool:
        self.looks += 1
        return self.looks >= self.over_at


NEVER = float("inf")


def looks_of(ours: Wakefulness, over_at: float = NEVER, **limit: float) -> int:
    event = Event(over_at)
    ours.stay_awake(event, **limit)
    return event.looks


def test_who_waits_looks_until_it_is_over_and_offers_its_core_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().put_in(monkeypatch)
    assert looks_of(Wakefulness(AWAKE_S), over_at=5) == 5
    assert clock.yields == 4
    assert clock.lets_go == 4  # of Python's lock, which sched_yield keeps


@pytest.mark.parametrize(("own_s", "limit_s"), [(0.0, NEVER), (AWAKE_S, 0.0), (AWAKE_S, -1.0), (0.0, 1.0)])
def test_who_may_not_wait_awake_does_not_even_look(
    monkeypatch: pytest.MonkeyPatch, own_s: float, limit_s: float
) -> None:
    Clock().put_in(monkeypatch)
    assert looks_of(Wakefulness(own_s), limit_s=limit_s) == 0


@pytest.mark.parametrize(("own_s", "limit_s"), [(20, NEVER), (20, 1000), (1000, 20)])
def test_the_shorter_limit_counts(monkeypatch: pytest.MonkeyPatch, own_s: float, limit_s: float) -> None:
    clock = Clock().put_in(monkeypatch)
    looks_of(Wakefulness(own_s * LOOK_S), limit_s=limit_s * LOOK_S)
    assert clock.now - 100 == pytest.approx(20 * LOOK_S, abs=2 * LOOK_S)


def test_a_late_rank_lets_nobody_sleep_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock().put_in(monkeypatch)
    ours = Wakefulness(AWAKE_S)
    for _ in range(3):
        assert looks_of(ours) > 100


def test_where_others_take_the_core_waits_are_slept_through_twice_as_many_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(dict.fromkeys(range(1, 1000), GAP_S)).put_in(monkeypatch)
    ours, asleep = Wakefulness(AWAKE_S), []
    for _ in range(11):
        assert looks_of(ours) == 1
        yields, slept = clock.yields, 0
        while True:
            event = Event(over_at=1)
            before = ours._waits_asleep
            if before == 0:
                break
            ours.stay_awake(event)
            assert event.looks == 0
            slept += 1
        assert clock.yields == yields
        asleep.append(slept)
    assert asleep == [1, 2, 4, 8, 16, 32, 64, 128, MOST_WAITS_ASLEEP, MOST_WAITS_ASLEEP, MOST_WAITS_ASLEEP]


def test_a_wait_that_ends_awake_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock({1: GAP_S, 2: GAP_S, 3: GAP_S}).put_in(monkeypatch)
    ours = Wakefulness(AWAKE_S)
    assert [looks_of(ours) for _ in range(5)] == [1, 0, 1, 0, 0]
    assert looks_of(ours, over_at=1) == 1
    assert [looks_of(ours, over_at=4) for _ in range(4)] == [1, 0, 4, 4]


def test_time_that_another_of_our_threads_has_used_was_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock({3: GAP_S}, ours=1.0).put_in(monkeypatch)
    assert looks_of(Wakefulness(AWAKE_S), over_at=10) == 10


def test_many_short_gaps_are_no_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as interrupts."""
    Clock(dict.fromkeys(range(1, 100), 0.5 * TAKEN_S)).put_in(monkeypatch)
    assert looks_of(Wakefulness(AWAKE_S), over_at=20) == 20


# ------------------------------------------------------------------ who may


@pytest.mark.parametrize(
    ("told", "num_ranks"),
    [("3", 3), ("0", 0), ("", 2), ("-1", 2), ("two", 2), ("1.5", 2), (" ", 2), (None, 2)],
)
@pytest.mark.parametrize("cores", [0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
def test_each_rank_must_have_a_core(
    monkeypatch: pytest.MonkeyPatch, told: str | None, num_ranks: int, cores: float
) -> None:
    """Of two ranks; LOCAL_WORLD_SIZE may say otherwise, or nonsense."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(awake, "usable_cores", lambda: cores)
    if told is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    assert wakefulness(1).limit_s == (AWAKE_S if num_ranks <= cores else 0.0)


def test_where_a_core_cannot_be_offered_nobody_stays_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(awake, "usable_cores", lambda: 8.0)
    assert wakefulness(1).limit_s == AWAKE_S
    monkeypatch.delattr(os, "sched_yield")
    assert wakefulness(1).limit_s == 0.0


@pytest.mark.parametrize(("num_ranks", "limit_s"), [(2, AWAKE_S), (3, 0.0)])
def test_without_a_default_group_ours_is_all_there_is(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, limit_s: float
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(awake, "usable_cores", lambda: 2.0)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert wakefulness(num_ranks).limit_s == limit_s


# ------------------------------------------------------------------ what is waited for


class FakeWork:
    """Of gloo; complete after some looks."""

    def __init__(self, over_at: float = 3, error: str = ""):
        self.event = Event(over_at)
        self.waits: list[Any] = []
        self._error = error

    def is_completed(self) -> bool:
        return self.event()

    def get_future(self) -> str:
        return "the future"

    def wait(self, *timeout: datetime.timedelta) -> bool:
        self.waits.append(timeout)
        if self._error:
            raise RuntimeError(self._error)
        return True


def awake_work(work: Any) -> _AwakeWork:
    return _AwakeWork(work, Wakefulness(AWAKE_S))


def test_work_is_waited_for_after_it_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock().put_in(monkeypatch)
    work = FakeWork()
    awake_work(work).wait()
    assert (work.event.looks, work.waits) == (3, [()])
    assert awake_work(work).get_future() == "the future"
    assert awake_work(work).is_completed()


def test_a_time_limit_holds_while_awake_and_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().put_in(monkeypatch)
    limit, work = datetime.timedelta(seconds=10 * LOOK_S), FakeWork(NEVER)
    awake_work(work).wait(limit)
    assert work.waits == [(limit,)]
    assert clock.yields <= 12
    nothing, work = datetime.timedelta(0), FakeWork(NEVER)
    awake_work(work).wait(nothing)
    assert (work.event.looks, work.waits) == (0, [(nothing,)])


@pytest.mark.parametrize("timeout", [None, datetime.timedelta(seconds=1)])
def test_what_goes_wrong_is_raised(monkeypatch: pytest.MonkeyPatch, timeout: datetime.timedelta | None) -> None:
    """Gloo's work is completed, too, when it has failed."""
    Clock().put_in(monkeypatch)
    with pytest.raises(RuntimeError, match="peer is gone"):
        awake_work(FakeWork(error="peer is gone")).wait(timeout)


class Watchful(Wakefulness):
    """Notes for how long it might have stayed awake, and sleeps."""

    def __init__(self) -> None:
        super().__init__(AWAKE_S)
        self.limits: list[float] = []

    def stay_awake(self, is_over: Callable[[], object], limit_s: float = NEVER) -> None:
        self.limits.append(limit_s)


def test_an_exchange_stays_awake_no_longer_than_it_may_wait() -> None:
    [peers, others] = connected(2)
    ours = Watchful()
    exchange, other = Exchange(0, peers, TIMEOUT_S, wakefulness=ours), Exchange(1, others, TIMEOUT_S)
    exchange.attend(0)
    exchange.attend(0.001)
    assert ours.limits == [0, 0.001]
    for each in (exchange, other):
        each.close()
        each.leave()


# ------------------------------------------------------------------ real ranks


def _works(rank: int, local_world_size: str, limited: bool) -> tuple[float, str, list[float]]:
    """What a rank may, and what its collectives leave: a sum, and what rank 1 has."""
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = local_world_size
    try:
        transport = ProcessGroupTransport(dist.group.WORLD)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before
    summed, told = torch.full((3,), rank + 1.0), torch.full((3,), rank + 1.0)
    for work in (transport.all_reduce(summed), transport.broadcast(told, source=1)):
        work.wait(datetime.timedelta(seconds=20)) if limited else work.wait()
        assert work.is_completed()
    assert transport._wakefulness is not None
    return transport._wakefulness.limit_s, type(work).__name__, [*summed.tolist(), *told.tolist()]


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize(("local_world_size", "limit_s"), [("0", AWAKE_S), ("100000", 0.0)])
def test_gloos_collectives_are_waited_for_either_way(
    ranks: Any, local_world_size: str, limit_s: float, limited: bool
) -> None:
    assert ranks(2).run(_works, local_world_size, limited) == [(limit_s, "_AwakeWork", [3.0] * 3 + [2.0] * 3)] * 2


def _who_is_looked_at(rank: int) -> list[str]:
    """By what they send: dense, too much, sparse with few rows of many."""
    transport = ProcessGroupTransport(dist.group.WORLD)
    most = LARGEST_AWAKE_BYTES // 4
    rows = torch.sparse_coo_tensor([[0, 1]], torch.ones(2, 8), (most, 8), is_coalesced=True)
    works = [transport.all_reduce(tensor) for tensor in (torch.ones(most), torch.ones(most + 1), rows)]
    for work in works:
        work.wait()
    return [type(work).__name__ for work in works]


def test_only_small_messages_are_waited_for_awake(ranks: Any) -> None:
    small, large, sparse = ranks(2).run(_who_is_looked_at)[0]
    assert small == sparse == "_AwakeWork"
    assert large != "_AwakeWork"


class _Sparse:
    """A message whose values are replaced by gloo's threads once it is under way."""

    device, dtype, is_sparse = torch.device("cpu"), torch.float32, True

    def __init__(self) -> None:
        self.is_under_way = False

    def _values(self) -> torch.Tensor:
        assert not self.is_under_way, "gloo's threads are at it"
        return torch.ones(2)

    def numel(self) -> int:
        assert not self.is_under_way, "gloo's threads are at it"
        return 2


def test_nobody_looks_at_a_message_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(_group: object, message: Any, *_options: object) -> SimpleNamespace:
        (message[0] if isinstance(message, list) else message).is_under_way = True
        return SimpleNamespace(wait=None, is_completed=None, get_future=None)

    monkeypatch.setattr(process_group, "_Group", SimpleNamespace(allreduce=send, broadcast=send))
    transport = ProcessGroupTransport.__new__(ProcessGroupTransport)
    transport.group, transport._is_foreign = cast("dist.ProcessGroup", None), False
    transport._wakefulness = Wakefulness(AWAKE_S)
    watched = WatchedTransport.__new__(WatchedTransport)
    watched._transport, watched._number, watched._recent = transport, 0, deque()
    for over in (transport, watched):
        reduced, told = (cast("torch.Tensor", _Sparse()) for _ in range(2))
        over.all_reduce(reduced)
        over.broadcast(told, 0)
    assert watched._number == 2
