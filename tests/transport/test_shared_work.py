"""Who hears that a collective in shared memory has completed: futures, and torch's profiler."""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torch.profiler import profile

from minddp.transport.shared_memory.collective import Collective
from tests.transport.places import Ranks, opened


def test_who_asks_early_is_called_and_who_asks_late_at_once() -> None:
    collective, calls = Collective("all-reduce 0", torch.ones(1), deadline=0), []
    collective.when_complete(lambda: calls.append("early"))
    assert calls == []
    collective.complete()
    collective.when_complete(lambda: calls.append("late"))
    assert calls == ["early", "late"]


def futures_of(rank: int) -> list[Any]:
    """Of one that nobody waits for otherwise, and of one that fails."""
    transport = opened()
    tensor = transport.allocate(10, torch.float32, torch.device("cpu")).fill_(rank + 1)
    seen: list[Any] = [sum(transport.all_reduce(tensor).get_future().wait()[0]).item()]
    work = transport.all_reduce(transport.allocate(5 + rank, torch.float32, torch.device("cpu")))
    try:
        work.get_future().wait()
    except RuntimeError as error:
        seen.append(str(error))
    return seen


def test_a_future_brings_the_sum_or_the_error(ranks: Ranks) -> None:
    for total, error in ranks(2).run(futures_of):
        assert total == 30
        assert "rank 0 has 5 elements of torch.float32, but rank 1 has 6" in error


def events_in_a_profile(rank: int) -> list[tuple[str, bool, bool]]:
    transport = opened()
    tensor = transport.allocate(1000, torch.float32, torch.device("cpu")).fill_(1)
    transport.all_reduce(tensor).wait()  # outside
    with profile() as seen:
        for _ in range(3):
            transport.all_reduce(tensor).wait(datetime.timedelta(seconds=20))
            transport.broadcast(tensor, source=0).wait(datetime.timedelta(seconds=20))
    events = [event for event in seen.events() if event.name.startswith("gloo:")]
    return [(event.name, event.is_async, event.time_range.elapsed_us() > 0) for event in events]


def test_a_profile_shows_them_as_it_shows_gloos(ranks: Ranks) -> None:
    for events in ranks(2).run(events_in_a_profile):
        assert sorted(events) == [("gloo:all_reduce", True, True)] * 3 + [("gloo:broadcast", True, True)] * 3


def profile_again_and_again(rank: int) -> int:
    """Each time a collective ends shortly before the profiler does; an event that ended later would crash."""
    transport = opened()
    tensor = transport.allocate(10, torch.float32, torch.device("cpu")).fill_(0)
    seen = 0
    for _ in range(40):
        with profile() as profiled:
            transport.all_reduce(tensor).wait()
            transport.broadcast(tensor, source=0).wait()
        seen += sum(event.name.startswith("gloo:") for event in profiled.events())
    return seen


def test_events_have_ended_when_a_profile_does(ranks: Ranks) -> None:
    assert ranks(2).run(profile_again_and_again) == [80, 80]
