"""When a rank that waits asks, what it reports, and what all ranks raise; without any other process."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minddp.platform import store as store_module
from minddp.tools.watchdog import RankState, Stuck, inquiry
from minddp.tools.watchdog.inquiry import Inquiry
from minddp.tools.watchdog.rank_state import EXITED, LEFT, SILENT
from minddp.tools.watchdog.watched_transport import WatchedTransport, _WatchedWork
from tests.fakes import FakeTransport
from tests.tools.watchdog.harness import Logged, reports
from tests.tools.watchdog.test_diagnosis import elsewhere, state

LIMIT_S = 10.0


class Ranks:
    """Rank 0 waits; the others answer what `answers` holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[int, RankState | str] = {0: state(0), 1: elsewhere(1)}
        self.num_asked = 0
        self.store = dist.HashStore()
        monkeypatch.setattr(Inquiry, "ask", lambda _inquiry, is_over: self._ask())
        monkeypatch.setattr(inquiry, "READ_EVERY_S", 0.01)

    def _ask(self) -> dict[int, RankState | str]:
        self.num_asked += 1
        return self.answers

    def transport(self, rank: int = 0) -> WatchedTransport:
        return WatchedTransport(FakeTransport(2, rank=rank, store=self.store), LIMIT_S, RankState)


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
    for transport in [ranks.transport(rank) for rank in (0, 1)]:
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
    assert str(transport._reason_to_give_up(3)).startswith("Rank 1 has exited")
    assert seconds_in(logged) == []


def test_all_ranks_raise_the_first_verdict(ranks: Ranks) -> None:
    first, second = (ranks.transport(rank) for rank in (0, 1))
    assert first._inquiry.settle("Rank 1 has exited.") == "Rank 1 has exited."
    assert second._inquiry.settle("Rank 0 has exited.") == "Rank 1 has exited."
    assert second._reason_to_give_up(1) == "Rank 1 has exited."


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


def error_of(transport: WatchedTransport, error: str) -> str:
    """The one that a wait raises when its work fails with `error`."""
    with pytest.raises(Stuck) as raised:
        _WatchedWork(Late(error), transport).wait()
    return str(raised.value)


def test_a_wait_that_fails_since_another_rank_has_raised_is_told_the_cause(ranks: Ranks) -> None:
    """The rank that raises first drops its module, and the others' waits fail before they look for its verdict."""
    first = error_of(ranks.transport(0), "Rank 1 has ended")
    assert "Rank 1 has ended" in first
    assert error_of(ranks.transport(1), "Rank 0 has left before all-reduce 7 was done") == first


def test_a_wait_that_fails_without_a_store_is_told_its_own_error(ranks: Ranks) -> None:
    transport = ranks.transport()
    with mock.patch.object(transport._inquiry.messages, "_name", side_effect=RuntimeError("the store has ended")):
        assert "Rank 1 has ended" in error_of(transport, "Rank 1 has ended")


def test_a_work_that_completes_when_its_wait_times_out_is_no_error(ranks: Ranks) -> None:
    _WatchedWork(Late(), ranks.transport()).wait()
    text = "Timed out waiting 30000ms for recv operation to complete"
    assert text in error_of(ranks.transport(), text)


def test_an_ended_process_of_this_host_is_an_occasion_to_ask(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (ranks.transport(rank) for rank in (0, 1))
    assert first._inquiry.occasions() == []
    monkeypatch.setattr("minddp.platform.rank_processes.process_state", lambda pid: "Z")
    assert second._inquiry.occasions() == ["end of rank 0", "end of rank 1"]


def test_a_rank_that_has_given_up_waits_for_nothing_that_is_under_way_and_launches_nothing(ranks: Ranks) -> None:
    """A step that is called off may leave dozens of works that never complete."""
    transport = ranks.transport()
    waited_s: list[float] = []
    transport.end_waits("Called off.")
    for _ in range(2):
        with pytest.raises(Stuck, match=r"Called off\."):
            transport.wait_until(lambda seconds: bool(waited_s.append(seconds)))
    assert len(waited_s) == 2
    assert max(waited_s) < 0.01
    with pytest.raises(Stuck, match=r"Called off\."):  # it would meet an earlier one of other ranks
        transport.all_reduce(torch.ones(1))


# ------------------------------------------------------------------ when the job is over


def test_a_store_whose_file_is_gone_does_not_keep_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that has seen one rank die removes the folder in which the ranks met, while the others end."""
    monkeypatch.setattr(store_module, "FILE_LIMIT_S", 0.2)
    folder = tmp_path / "meeting"
    folder.mkdir()
    store = dist.FileStore(str(folder / "store"), 2)
    store.set_timeout(datetime.timedelta(minutes=30))
    prefixed = dist.PrefixStore("default", dist.PrefixStore("group", store))
    one = Inquiry(FakeTransport(2, store=prefixed), lambda: None)
    shutil.rmtree(folder)
    one.close()
    assert store.timeout == datetime.timedelta(minutes=30)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Inquiry, ...]]:
    monkeypatch.setattr(inquiry, "READ_EVERY_S", 0.01)
    store = dist.HashStore()
    both = [Inquiry(FakeTransport(2, rank, store=store), RankState) for rank in range(2)]
    yield (*both,)
    for one in both:
        one.close()
    # A process may wrap hundreds of modules, one after the other.
    assert store.num_keys() == len(["opened by rank 0", "opened by rank 1"])


def test_who_does_not_answer_is_not_waited_for_once_there_is_no_need(
    two: tuple[Inquiry, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inquiry, "ANSWER_LIMIT_S", 3600.0)
    monkeypatch.setattr(Inquiry, "_answer", lambda *_: None)
    assert two[0].ask(lambda: True) == {0: SILENT, 1: SILENT}


def test_the_last_rank_to_leave_clears_the_store(two: tuple[Inquiry, ...]) -> None:
    two[0].close()
    assert two[1]._absence(0) == LEFT
