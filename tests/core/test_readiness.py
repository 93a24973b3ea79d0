"""Readiness: hooks count down parameters, parameters count down pack groups."""

from __future__ import annotations

import pytest
import torch

from minddp.core.bucket import Bucket
from minddp.core.bucket_store import BucketStore
from minddp.core.events import Event, EventKind, EventStream
from minddp.core.packing import LARGE_BYTES
from minddp.core.plan import ParamSpec
from minddp.core.readiness import Readiness
from minddp.options import UNBOUNDED

LARGE = LARGE_BYTES // 4
SIZES = (1, LARGE, 1, LARGE, 1, 1)  # one bucket with three pack groups: 1 and 3 are alone


class Twice(Exception):
    """What `on_ready_twice` raises here."""


class Log:
    """Notes which groups are ready."""

    def __init__(self) -> None:
        self.groups: list[tuple[int, ...]] = []
        self.events = EventStream()
        params = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
        specs = [ParamSpec(f"p{i}", p.numel(), p.dtype, p.device) for i, p in enumerate(params)]
        self.store = BucketStore(params, specs, Bucket, [UNBOUNDED], [UNBOUNDED])

    def readiness(self, hooks_left: list[int]) -> Readiness:
        return Readiness(hooks_left, self.store, self.events, self.on_group_ready, self.on_ready_twice)

    def on_group_ready(self, group: int) -> None:
        self.groups.append(tuple(sorted(self.store.members[group])))

    def on_ready_twice(self, param: int) -> None:
        raise Twice(param)


@pytest.fixture
def log() -> Log:
    return Log()


SMALL_ONES = (0, 2, 4, 5)


def test_a_group_is_ready_with_the_last_of_its_parameters(log: Log) -> None:
    readiness = log.readiness([1] * 6)
    for param in (3, 0, 4, 2):
        readiness.mark_ready(param)
    assert log.groups == [(3,)]
    readiness.mark_ready(5)
    assert log.groups == [(3,), SMALL_ONES]
    assert readiness.missing() == [1]
    readiness.mark_ready(1)
    assert log.groups == [(3,), SMALL_ONES, (1,)]
    assert readiness.missing() == []
    assert readiness.ready_order == [3, 0, 4, 2, 5, 1]


@pytest.mark.parametrize("again", [0, 1])
def test_a_hook_that_fires_once_too_often_is_reported_and_not_counted(log: Log, again: int) -> None:
    readiness = log.readiness([1] * 6)
    readiness.mark_ready(again)
    with pytest.raises(Twice, match=str(again)):
        readiness.mark_ready(again)
    with pytest.raises(Twice, match=str(again)):
        readiness.mark_ready(again)
    assert readiness.ready_order == [again]
    assert log.groups == ([(1,)] if again == 1 else [])


def test_a_parameter_is_ready_when_its_hook_has_fired_as_often_as_expected(log: Log) -> None:
    readiness = log.readiness([1, 3, 1, 1, 1, 1])
    for left in (3, 2, 1):
        assert (1 in readiness.missing(), readiness.hooks_left[1]) == (True, left)
        readiness.mark_ready(1)
    assert log.groups == [(1,)]
    with pytest.raises(Twice):
        readiness.mark_ready(1)


def test_a_parameter_without_hooks_is_not_missing_and_counts_once_it_is_marked_unused(log: Log) -> None:
    readiness = log.readiness([0, 0, 1, 1, 1, 1])
    assert readiness.missing() == [2, 3, 4, 5]
    readiness.mark_unused(1)
    readiness.mark_unused(0)
    assert log.groups == [(1,)]
    assert readiness.ready_order == [1, 0]
    for param in (0, 1):
        with pytest.raises(Twice, match=str(param)):
            readiness.mark_ready(param)


def test_a_parameter_that_is_found_unused_and_then_used_is_ready_twice(log: Log) -> None:
    with pytest.raises(Twice, match="2"):
        log.readiness([1, 1, 0, 1, 1, 1]).mark_ready(2)


def test_the_expected_counts_are_not_changed(log: Log) -> None:
    """An expectation returns the same list for every backward."""
    expected = [1] * 6
    log.readiness(expected).mark_ready(0)
    assert expected == [1] * 6


def test_one_backward_does_not_count_for_another(log: Log) -> None:
    log.readiness([1] * 6).mark_ready(1)
    readiness = log.readiness([1] * 6)
    readiness.mark_ready(1)
    assert log.groups == [(1,), (1,)]
    assert readiness.missing() == [0, 2, 3, 4, 5]


def test_each_parameter_is_an_event_before_its_group_is_ready(log: Log) -> None:
    seen: list[object] = []
    log.events.watch(seen.append)
    log.groups = seen  # type: ignore[assignment]
    readiness = log.readiness([2, 1, 1, 1, 1, 1])
    readiness.mark_ready(0)
    readiness.mark_ready(1)
    readiness.mark_ready(0)
    readiness.mark_unused(3)
    ready = [Event(EventKind.PARAM_READY, param) for param in (1, 0, 3)]
    assert seen == [ready[0], (1,), ready[1], ready[2], (3,)]
