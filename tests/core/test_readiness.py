"""Who is still awaited: parameters one by one, or runs as a whole, and from the one to the other."""

from __future__ import annotations

import pytest

from minddp.core.readiness import Countdown

MEMBERS = [[2, 0], [1], [4, 3, 5]]


class Twice(Exception):
    """As the reducer raises it."""


class Log:
    """A watcher that notes what it hears, and lets everything be counted."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.fails = False

    def attend(self, param: int) -> bool:
        self.heard.append(f"attend {param}")
        return True

    def on_run_ready(self, run: int) -> None:
        if self.fails:
            raise OSError("no room")
        self.heard.append(f"run {run}")

    def on_ready_twice(self, param: int) -> None:
        raise Twice(param)

    def note_error(self, error: Exception) -> None:
        self.heard.append(f"error {error!r}")


@pytest.fixture
def log() -> Log:
    return Log()


def countdown(log: Log, *, as_a_whole: bool) -> Countdown:
    counts = Countdown(log)
    counts.regroup(MEMBERS)
    counts.is_watched = False
    counts.restart(as_a_whole=as_a_whole)
    return counts


def test_a_run_is_ready_with_the_last_of_its_parameters(log: Log) -> None:
    counts = countdown(log, as_a_whole=False)
    for param in (3, 0, 4, 2, 5, 1):
        counts.on_grad_accumulated(param)
    assert log.heard == ["run 0", "run 2", "run 1"]
    assert counts.last_of_runs == [2, 1, 5]
    assert counts.missing() == []


def test_a_run_that_is_awaited_as_a_whole_is_ready_at_once(log: Log) -> None:
    counts = countdown(log, as_a_whole=True)
    counts.strike_off_run(2)
    assert log.heard == ["run 2"]
    assert counts.missing() == [0, 1, 2]
    counts.strike_off_run(1)
    counts.strike_off_run(0)
    assert counts.missing() == []
    assert counts.last_of_runs == [0, 1, 5]  # nobody has counted who came last


@pytest.mark.parametrize("again", [0, 1, 2])
def test_a_run_cannot_be_ready_twice(log: Log, again: int) -> None:
    counts = countdown(log, as_a_whole=True)
    for run in range(3):
        counts.strike_off_run(run)
    with pytest.raises(Twice, match=str(counts.last_of_runs[again])):
        counts.strike_off_run(again)
    assert log.heard == ["run 0", "run 1", "run 2"]


def test_from_the_middle_on_each_is_counted_of_runs_that_are_not_ready(log: Log) -> None:
    counts = countdown(log, as_a_whole=True)
    counts.strike_off_run(0)
    for _ in range(2):  # the second time there is nothing left to do
        counts.count_each()
        assert counts.missing() == [1, 3, 4, 5]
    with pytest.raises(Twice, match="1"):
        counts.strike_off_run(1)
    for param in (5, 1, 3):
        counts.strike_off(param)
    assert counts.missing() == [4]
    counts.strike_off(4)
    assert log.heard == ["run 0", "run 1", "run 2"]
    with pytest.raises(Twice, match="2"):
        counts.strike_off(2)  # of the run that was ready as a whole


def test_one_that_is_awaited_with_its_run_is_not_counted_by_itself(log: Log) -> None:
    counts = countdown(log, as_a_whole=True)
    with pytest.raises(Twice, match="4"):
        counts.strike_off(4)


@pytest.mark.parametrize("was_whole", [False, True])
@pytest.mark.parametrize("as_a_whole", [False, True])
def test_a_new_backward_awaits_all_whatever_has_become_of_the_last(
    log: Log, was_whole: bool, as_a_whole: bool
) -> None:
    counts = countdown(log, as_a_whole=was_whole)
    if was_whole:
        counts.strike_off_run(2)
    else:
        counts.strike_off(4)
    counts.restart(as_a_whole=as_a_whole)
    assert counts.missing() == list(range(6))
    log.heard.clear()
    if as_a_whole:
        for run in range(3):
            counts.strike_off_run(run)
    else:
        for param in range(6):
            counts.strike_off(param)
    assert sorted(log.heard) == ["run 0", "run 1", "run 2"]
    assert counts.missing() == []


def test_other_groups_begin_anew(log: Log) -> None:
    counts = countdown(log, as_a_whole=True)
    counts.regroup([[1, 0]])
    assert counts.missing() == []
    assert counts.run_of == {0: 0, 1: 0}
    counts.restart(as_a_whole=False)
    counts.strike_off(0)
    counts.strike_off(1)
    assert log.heard == ["run 0"]


# ------------------------------------------------------------------ the hook


def test_who_is_watched_is_attended_to_first(log: Log) -> None:
    counts = countdown(log, as_a_whole=False)
    counts.is_watched = True
    counts.on_grad_accumulated(1, None, None)
    assert log.heard == ["attend 1", "run 1"]


def test_who_only_wants_to_know_is_told_before(log: Log) -> None:
    counts = countdown(log, as_a_whole=False)
    counts.tell_ready = lambda param: log.heard.append(f"ready {param}")
    counts.on_grad_accumulated(1)
    assert log.heard == ["ready 1", "run 1"]


@pytest.mark.parametrize("is_watched", [False, True])
def test_an_error_in_a_hook_is_noted_once_and_raised(log: Log, is_watched: bool) -> None:
    """Wherever it comes from: the engine raises it past the wrapper."""
    counts = countdown(log, as_a_whole=False)
    counts.is_watched, log.fails = is_watched, True
    with pytest.raises(OSError, match="no room"):
        counts.on_grad_accumulated(1)
    assert log.heard == ["attend 1"] * is_watched + ["error OSError('no room')"]
    counts.is_watched = False
    with pytest.raises(Twice):
        counts.on_grad_accumulated(1)
    assert log.heard[-1] == "error Twice(1)"


def test_hooks_outlive_their_wrapper_and_do_nothing_then(log: Log) -> None:
    counts = Countdown(Log())
    counts.regroup(MEMBERS)
    counts.on_grad_accumulated(1)
