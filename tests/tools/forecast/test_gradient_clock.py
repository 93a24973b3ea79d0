"""Times on a host and on a device: what a stamp is, when the host waits for one, and what has no clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minddp.core.events import Event, EventKind
from minddp.tools.forecast import gradient_clock
from minddp.tools.forecast.auto_buckets import Observer, observed
from minddp.tools.forecast.gradient_clock import DeviceClock, HostClock, HostMark, clock_of
from tests.tools.forecast.made_up import FakeDevice

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
A_BACKWARD = [
    Event(EventKind.BACKWARD_BEGIN),
    Event(EventKind.PARAM_READY, 1),
    Event(EventKind.PARAM_READY, 0),
    Event(EventKind.GRADIENTS_COMPLETE),
    Event(EventKind.BACKWARD_END),
]


def test_a_stamp_of_another_stream_is_waited_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later of two marks may be passed first, if they are of two streams."""
    device = FakeDevice.installed(monkeypatch)
    clock = DeviceClock(GPU)
    first, last = clock.stamp(), clock.stamp()
    device.queue.reverse()
    assert clock.seconds(first, last) == pytest.approx(-0.003)


def test_a_host_does_not_count_waiting_for_a_core_as_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    observer = Observer(HostClock())
    now_s, on_core_s = 100.0, 5.0
    asked = SimpleNamespace(perf_counter=lambda: now_s, thread_time=lambda: on_core_s)
    monkeypatch.setattr(gradient_clock, "time", asked)
    spans = [(0.0, 0.0), (1.0, 0.0), (1.0, 3.0), (0.5, 0.25), (0.0, 2.0)]  # before each event: computing, waiting
    for event, (computing_s, waiting_s) in zip(A_BACKWARD, spans, strict=True):
        now_s, on_core_s = now_s + computing_s + waiting_s, on_core_s + computing_s
        observer(event)
    seen = observed(observer.backwards[0], HostClock())
    assert seen.ready_s == pytest.approx({1: 1.0, 0: 2.0})
    assert seen.computed_s == pytest.approx(2.5)
    assert seen.gradients_complete_s == pytest.approx(5.75)
    assert seen.end_s == pytest.approx(7.75)


@pytest.mark.parametrize(("other_account_s", "expected_s"), [(-70.0, 0.0), (70.0, 1.0)])
def test_accounts_of_two_threads_give_no_more_than_the_time_between(
    other_account_s: float, expected_s: float
) -> None:
    """As in a backward within a backward, which may run on another thread."""
    assert HostClock().computed_s(HostMark(100.0, 5.0), HostMark(101.0, other_account_s)) == expected_s


def test_the_clock_is_that_of_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(clock_of([CPU, CPU]), HostClock)
    assert isinstance(clock_of([]), HostClock)
    assert isinstance(clock_of([GPU, GPU]), DeviceClock)


@pytest.mark.parametrize("devices", [[CPU, GPU], [GPU, torch.device("cuda", 1)], [torch.device("meta")]])
def test_devices_without_a_clock_are_refused(devices: list[torch.device]) -> None:
    with pytest.raises(NotImplementedError, match=rf"parameters are on .*{devices[0]}.*Pass a number"):
        clock_of(devices)
