"""When a rank that waits asks, what it reports, and what all ranks raise; without any other process."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from minddp.tools.watchdog import RankState, Stuck
from minddp.tools.watchdog.inquiry import Inquiry
from minddp.tools.watchdog.rank_state import EXITED
from minddp.tools.watchdog.watched_transport import WatchedTransport, _WatchedWork
from tests.fakes import FakeTransport
from tests.tools.watchdog.harness import Logged, reports
from tests.tools.watchdog.test_diagnosis import collectives, elsewhere, state

LIMIT_S = 10.0


class Ranks:
    """Rank 0 waits; the others answer what `answers` holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[int, RankState | str] = {0: state(0), 1: elsewhere(1)}
        self.num_asked = 0
        self.store = dist.HashStore()
        monkeypatch.setattr(Inquiry, "ask", lambda _inquiry, is_over: self._ask())
        monkeypatch.setattr("minddp.tools.watchdog.inquiry.READ_EVERY_S", 0.01)

    def _ask(self) -> dict[int, RankState | str]:
        self.num_asked += 1
        return self.answers

    def transport(self, rank: int = 0) -> WatchedTransport:
        over = FakeTransport(2, rank=rank, store=self.store)
        return WatchedTransport(over, self.store, LIMIT_S, RankState)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


@pytest.fixture
def logged() -> Iterator[Logged]:
    with reports() as logged:
        yield logged


def seconds_in(logged: Logged) -> list[int]:
    return [int(text.removeprefix("Waited for ").split()[0]) for text in logged]


def test_reports_come_at_growing_intervals(ranks: Ranks, logged: Logged) -> None:
    transport = ranks.transport()
    assert {transport._reason_to_give_up(second) for second in range(1, 200)} == {None}
    assert seconds_in(logged) == [10, 20, 40, 80, 160]


def test_one_rank_of_a_host_asks(ranks: Ranks, logged: Logged) -> None:
    both = [ranks.transport(rank) for rank in (0, 1)]
    for transport in both:
        transport._reason_to_give_up(10)
    assert ranks.num_asked == 1
    assert seconds_in(logged) == [10]


def test_an_alarm_is_an_occasion_to_ask_and_reported_if_it_ends_the_wait(ranks: Ranks, logged: Logged) -> None:
    transport = ranks.transport()
    assert transport._reason_to_give_up(1) is None
    assert ranks.num_asked == 0
    transport._inquiry.alarm()
    assert transport._reason_to_give_up(2) is None
    assert ranks.num_asked == 1
    transport._inquiry.alarm()
    ranks.answers = {0: state(0), 1: EXITED}
    reason = transport._reason_to_give_up(3)
    assert reason is not None
    assert reason.startswith("Rank 1 has exited")
    assert seconds_in(logged) == []


def test_all_ranks_raise_the_first_verdict(ranks: Ranks) -> None:
    first, second = (ranks.transport(rank) for rank in (0, 1))
    assert first._inquiry.settle("Rank 1 has exited.") == "Rank 1 has exited."
    assert second._inquiry.settle("Rank 0 has exited.") == "Rank 1 has exited."
    assert second._reason_to_give_up(1) == "Rank 1 has exited."


def test_a_wait_that_fails_since_another_rank_has_raised_is_told_the_cause(ranks: Ranks) -> None:
    """The rank that raises first drops its module, and the others' waits fail before they look for its verdict."""
    first, second = (ranks.transport(rank) for rank in (0, 1))
    with pytest.raises(Stuck, match="Rank 1 was killed") as raised:
        _WatchedWork(Late("Rank 1 was killed"), first).wait()
    with pytest.raises(Stuck) as follows:
        _WatchedWork(Late("Rank 0 has left before all-reduce 7 was done"), second).wait()
    assert str(follows.value) == str(raised.value)


def test_a_wait_that_fails_without_a_store_is_told_its_own_error(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = ranks.transport()

    def ended(*_: object) -> None:
        raise RuntimeError("the store has ended")

    monkeypatch.setattr(transport._inquiry.messages, "_name", ended)
    with pytest.raises(Stuck, match="Rank 1 was killed"):
        _WatchedWork(Late("Rank 1 was killed"), transport).wait()


def test_an_ended_process_of_this_host_is_an_occasion_to_ask(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (ranks.transport(rank) for rank in (0, 1))
    assert first._inquiry.occasions() == []
    monkeypatch.setattr("minddp.platform.rank_processes.process_state", lambda pid: "Z")
    assert second._inquiry.occasions() == ["end of rank 0", "end of rank 1"]


class Late:
    """A work that completes, or fails with `error`, just when its wait has timed out."""

    def __init__(self, error: str = ""):
        self._error, self._is_completed = error, False

    def is_completed(self) -> bool:
        return self._is_completed

    def wait(self, timeout: datetime.timedelta = datetime.timedelta.max) -> None:
        if not self._is_completed:
            self._is_completed = True
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)


def test_a_work_that_completes_when_its_wait_times_out_is_no_error(ranks: Ranks) -> None:
    _WatchedWork(Late(), ranks.transport()).wait()
    with pytest.raises(Stuck, match="Timed out waiting 30000ms"):
        _WatchedWork(Late("Timed out waiting 30000ms for recv operation to complete"), ranks.transport()).wait()


# ------------------------------------------------------------------ [Note: a backward that is dropped]


@pytest.fixture
def impatient(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Rank 1 drops a backward, and rank 0 has gone on with its collectives."""
    monkeypatch.setattr("minddp.tools.watchdog.watched_transport.CHECK_WAIT_EVERY_S", 0.05)
    behind = state(1, recent=collectives(5), drops=True, phase="ACCUMULATING", missing=("b",))
    ranks.answers = {0: state(0, recent=collectives(5, 6)), 1: behind}
    return ranks


def launch_on(transport: WatchedTransport) -> None:
    transport.watch_future(torch.ones(1), torch.futures.Future())


def test_a_rank_that_drops_what_others_go_on_with_is_an_error(impatient: Ranks) -> None:
    transport = impatient.transport(1)
    launch_on(transport)
    with pytest.raises(Stuck, match="An exception has ended backward 3 on rank 1 before the gradients of `b`"):
        transport.agree_to_drop()
    left = transport.state()
    assert left is not None
    assert left.drops, "what it leaves behind shows why"


def test_a_script_that_catches_the_error_goes_on_with_no_collective(impatient: Ranks) -> None:
    """Its next collective would meet one that the others have launched before, and be added to it in silence."""
    transport = impatient.transport(1)
    launch_on(transport)
    for act in (transport.agree_to_drop, transport.agree_to_drop, lambda: transport.all_reduce(torch.ones(1))):
        with pytest.raises(Stuck, match="An exception has ended backward 3 on rank 1"):
            act()
    assert impatient.num_asked == 1


def test_a_rank_that_comes_twice_does_not_stand_for_another(impatient: Ranks) -> None:
    inquiry = impatient.transport(1)._inquiry
    waits = [inquiry.messages.arrive("after collective 1", limit_s=60.0) for _ in range(2)]
    assert not any(all_come_within(0) for all_come_within in waits)
    impatient.transport(0)._inquiry.messages.arrive("after collective 1", limit_s=60.0)
    assert all(all_come_within(0) for all_come_within in waits)


def test_what_has_launched_nothing_is_dropped_without_the_others(impatient: Ranks) -> None:
    transport = impatient.transport(1)
    launch_on(transport)
    transport.settle()
    transport.agree_to_drop()
    assert impatient.num_asked == 0


def test_ranks_that_have_launched_as_much_drop_together(impatient: Ranks) -> None:
    both = [impatient.transport(rank) for rank in (0, 1)]
    for _ in range(2):
        for transport in both:
            launch_on(transport)
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(WatchedTransport.agree_to_drop, both)) == [None, None]
    assert impatient.num_asked == 0
    assert not any(transport._drops for transport in both)


def test_a_rank_that_has_given_up_waits_for_nothing_that_is_still_under_way(ranks: Ranks) -> None:
    """A step that is called off may leave dozens of works that never complete."""
    transport = ranks.transport()
    waited_s: list[float] = []
    transport.end_waits("Called off.")
    for _ in range(2):
        with pytest.raises(Stuck, match=r"Called off\."):
            transport.wait_until(lambda seconds: bool(waited_s.append(seconds)))
    assert len(waited_s) == 2
    assert max(waited_s) < 0.01
