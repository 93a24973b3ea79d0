"""Times on a host and on a device: what a stamp is, when the host waits for one, and what has no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from minddp.core.events import Event, EventKind
from minddp.tools.forecast import gradient_clock
from minddp.tools.forecast.auto_buckets import Observer, observed
from minddp.tools.forecast.gradient_clock import DeviceClock, HostClock, clock_of
from minddp.tools.forecast.step_model import Observed
from tests.tools.forecast.made_up import FakeDevice

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
A_BACKWARD = [
    Event(EventKind.BACKWARD_BEGIN),
    Event(EventKind.PARAM_READY, 1),
    Event(EventKind.PARAM_READY, 0),
    Event(EventKind.GRADIENTS_COMPLETE),
    Event(EventKind.BACKWARD_END),
]


def test_a_backward_is_timed_by_the_device_and_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    device.install(monkeypatch)
    clock = DeviceClock(GPU)
    observer = Observer(clock)
    for event in A_BACKWARD * 2:
        observer(event)
    assert device.waits == 0, "a step that is observed waits for nothing"
    expected = Observed({1: 0.003, 0: 0.006}, computed_s=0.009, gradients_complete_s=0.009, end_s=0.012)
    for stamps in observer.backwards:
        seen = observed(stamps, clock)
        assert seen.ready_s == pytest.approx(expected.ready_s)
        assert seen.gradients_complete_s == seen.computed_s, "a device is taken to compute whenever it can"
        assert (seen.gradients_complete_s, seen.end_s) == pytest.approx(
            (expected.gradients_complete_s, expected.end_s)
        )
    assert len(observer.backwards) == 2


def test_a_stamp_of_another_stream_is_waited_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later of two marks may be passed first, if they are of two streams."""
    device = FakeDevice()
    device.install(monkeypatch)
    clock = DeviceClock(GPU)
    first, last = clock.stamp(), clock.stamp()
    device.queue.reverse()
    assert clock.seconds(first, last) == pytest.approx(-0.003)


@dataclass
class FakeHost:
    """A moment, by the wall and by the account of each thread, and which thread runs."""

    now_s: float = 100.0
    on_core_s: dict[int, float] = field(default_factory=lambda: {1: 5.0, 2: 70.0})
    thread: int = 1

    def pass_time(self, computing_s: float, waiting_s: float = 0.0) -> None:
        self.now_s += computing_s + waiting_s
        self.on_core_s[self.thread] += computing_s

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In the place of the modules that the host's clock reads."""
        asked = SimpleNamespace(perf_counter=lambda: self.now_s, thread_time=lambda: self.on_core_s[self.thread])
        monkeypatch.setattr(gradient_clock, "time", asked)
        monkeypatch.setattr(gradient_clock, "threading", SimpleNamespace(get_ident=lambda: self.thread))


def observed_on(host: FakeHost, spans: list[tuple[int, float, float]], monkeypatch: pytest.MonkeyPatch) -> Observed:
    """`A_BACKWARD`, and what passes before each event but the first: on which thread, computing, waiting."""
    observer = Observer(HostClock())
    with monkeypatch.context() as patch:
        host.install(patch)
        observer(A_BACKWARD[0])
        for event, (thread, computing_s, waiting_s) in zip(A_BACKWARD[1:], spans, strict=True):
            host.thread = thread
            host.pass_time(computing_s, waiting_s)
            observer(event)
    return observed(observer.backwards[0], HostClock())


def test_a_host_does_not_count_waiting_for_a_core_as_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = observed_on(FakeHost(), [(1, 1.0, 0.0), (1, 1.0, 3.0), (1, 0.5, 0.25), (1, 0.0, 2.0)], monkeypatch)
    assert seen.ready_s == pytest.approx({1: 1.0, 0: 2.0})
    assert seen.computed_s == pytest.approx(2.5)
    assert seen.gradients_complete_s == pytest.approx(5.75)
    assert seen.end_s == pytest.approx(7.75)


def test_a_gradient_of_another_thread_counts_with_all_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a backward within a backward: accounts of two threads cannot be subtracted."""
    seen = observed_on(FakeHost(), [(1, 1.0, 0.0), (2, 1.0, 3.0), (1, 0.5, 0.0), (1, 0.0, 2.0)], monkeypatch)
    assert seen.ready_s == pytest.approx({1: 1.0, 0: 5.0})
    assert seen.computed_s == pytest.approx(5.0), "never less than until a gradient was ready"
    assert seen.gradients_complete_s == pytest.approx(5.5)


def test_the_clock_is_that_of_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(clock_of([CPU, CPU]), HostClock)
    assert isinstance(clock_of([]), HostClock)
    assert isinstance(clock_of([GPU, GPU]), DeviceClock)


@pytest.mark.parametrize("devices", [[CPU, GPU], [GPU, torch.device("cuda", 1)], [torch.device("meta")]])
def test_devices_without_a_clock_are_refused(devices: list[torch.device]) -> None:
    with pytest.raises(NotImplementedError, match=rf"parameters are on .*{devices[0]}.*Pass a number"):
        clock_of(devices)
