from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from minddp.core.events import EventKind, EventStream
from minddp.core.plan import BucketPlan
from minddp.core.reducer import Reducer
from minddp.tools.xray import record
from minddp.tools.xray.record import Recorder, interpolated
from tests.fakes import FakeDDP
from tests.tools.xray.made_up import layout


class FakeSource:
    """A source whose events come from the test."""

    wrapper, has_plan, title, adds_after_s = "fake", True, "a fake", 0.0
    rank, world_size, store, topic, backend = 0, 1, None, "topic", "none"
    device = torch.device("cpu")
    steps_taken = 5

    def __init__(self) -> None:
        self.events = EventStream()
        self.emit = self.events.emit
        self.now = layout([[1], [1]])

    def plan(self) -> BucketPlan:
        return self.now


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.mark.parametrize("earlier", [0, 1])
def test_events_are_kept_with_their_time_in_order(source: FakeSource, earlier: int) -> None:
    """Also in a second recording."""
    for _ in range(earlier):
        recorder = Recorder(source)
        source.emit(EventKind.BACKWARD_END)
        recorder.stop()
    recorder = Recorder(source)
    before = time.perf_counter_ns()
    source.emit(EventKind.FORWARD_BEGIN)
    source.emit(EventKind.PARAM_READY, 3)
    recorded = recorder.stop()
    assert [event[1:] for event in recorded.events] == [(EventKind.FORWARD_BEGIN, -1), (EventKind.PARAM_READY, 3)]
    times = [before, *(event.t_ns for event in recorded.events), recorded.stopped_ns, time.perf_counter_ns()]
    assert times == sorted(times)
    assert recorded.first_step == 5
    assert source.events.sink is None


def test_the_ring_keeps_the_latest(source: FakeSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "CAPACITY", 10)
    recorder = Recorder(source)
    for param in range(25):
        source.emit(EventKind.PARAM_READY, param)
    recorded = recorder.stop()
    assert [event.subject for event in recorded.events] == list(range(15, 25))
    assert recorded.is_full


def test_optimizers_are_recorded_while_it_runs_and_only_then(source: FakeSource) -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.step()
    recorder = Recorder(source)
    optimizer.step()
    recorded = recorder.stop()
    optimizer.step()
    assert [event.kind for event in recorded.events] == [EventKind.OPTIMIZER_BEGIN, EventKind.OPTIMIZER_END]
    assert len(recorder._ring) == 2


def test_the_plan_at_the_end_is_recorded(source: FakeSource) -> None:
    recorder = Recorder(source)
    source.now = layout([[1, 1]])
    source.emit(EventKind.BUCKETS_REBUILT, 1)
    recorded = recorder.stop()
    assert recorded.plan == source.now


# ------------------------------------------------------------------ events of the reducer


def step(ddp: FakeDDP) -> None:
    ddp(torch.ones(2, 4)).sum().backward()


def test_a_hook_emits_its_gradient_also_in_the_quick_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """See [Note: the hook is bound]: after the first gradient `_on_hook` is no longer called for each parameter."""
    slow, on_hook = [], Reducer._on_hook
    monkeypatch.setattr(Reducer, "_on_hook", lambda self, param: slow.append(param) or on_hook(self, param))
    ddp = FakeDDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    for _ in range(3):
        step(ddp)
    ddp.take_events()
    slow.clear()
    step(ddp)
    assert ddp.take_events(EventKind.PARAM_READY) == [f"parameter ready: {param}" for param in (3, 2, 1, 0)]
    assert slow == [3]


# ------------------------------------------------------------------ on a GPU, as far as it can be seen without one


class FakeDeviceClock:
    """A device that reaches the first stamp at once, the second 1 ms after the host's call, the third 2 ms, ..."""

    def __init__(self, device: torch.device):
        self._stamps = 0

    def stamp(self) -> int:
        self._stamps += 1
        return time.perf_counter_ns() + (self._stamps - 1) * 10**6

    def seconds(self, first: int, last: int) -> float:
        return (last - first) / 1e9


def test_on_a_device_its_own_times_count(source: FakeSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "DeviceClock", FakeDeviceClock)
    monkeypatch.setattr(record.streams, "properties", lambda device: SimpleNamespace(name="a fake"))
    source.device = torch.device("cuda")
    recorder = Recorder(source)
    before = time.perf_counter_ns()
    source.emit(EventKind.BACKWARD_BEGIN)
    source.emit(EventKind.PARAM_READY, 0)
    source.emit(EventKind.BUCKET_LAUNCHED, 0)
    recorded = recorder.stop()
    begin, ready, launched = (event.t_ns - before for event in recorded.events)
    assert begin >= 10**6
    assert launched >= 2 * 10**6
    assert begin <= ready <= launched, "a gradient has no stamp of its own, but lies between those around it"
    assert recorded.device == "a fake"
    assert recorded.stopped_ns >= recorded.events[-1].t_ns


def test_a_completion_a_moment_late_is_recorded(source: FakeSource) -> None:
    recorder = Recorder(source)
    source.emit(EventKind.BUCKET_LAUNCHED, 0)
    threading.Timer(0.005, source.emit, [EventKind.BUCKET_COMPLETED, 0]).start()
    assert [event.kind for event in recorder.stop().events][-1] is EventKind.BUCKET_COMPLETED


def test_the_wait_for_a_completion_has_a_limit(source: FakeSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "COMPLETIONS_S", 0.0)
    recorder = Recorder(source)
    source.emit(EventKind.BUCKET_LAUNCHED, 0)
    assert [event.kind for event in recorder.stop().events] == [EventKind.BUCKET_LAUNCHED]


@pytest.mark.parametrize(
    ("host", "device", "found"),
    [
        ([0, 10, 20, 30, 40], {0: 100, 30: 400, 40: 401}, [100, 200, 300, 400, 401]),
        ([0, 10, 20], {10: 50}, [50, 50, 50]),
        ([1, 2], {}, [1, 2]),
    ],
    ids=["between its neighbours", "before the first and after the last", "without any, by the host"],
)
def test_the_time_of_an_event_that_has_no_stamp(host: list[int], device: dict[int, int], found: list[int]) -> None:
    hour = 3_600 * 10**9  # a machine that has been up for long: nanoseconds must not be lost in floats
    stamps = {hour + t: hour + at for t, at in device.items()}
    assert interpolated([hour + t for t in host], stamps) == [hour + t for t in found]
