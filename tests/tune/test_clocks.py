"""Times on a host and on a device: what a stamp is, when anybody waits for one, and what has no clock."""

from __future__ import annotations

import pytest
import torch

from minddp.events import Event, EventKind
from minddp.tune.auto import Observed, Observer
from minddp.tune.clocks import DeviceClock, HostClock, clock_of
from tests.tune.made_up import FakeDevice

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
    expected = Observed({1: 0.003, 0: 0.006}, 0.009, 0.012)
    for stamps in observer.passes:
        seen = stamps.read(clock)
        assert seen.ready_s == pytest.approx(expected.ready_s)
        assert (seen.gradients_complete_s, seen.end_s) == pytest.approx((0.009, 0.012))
    assert len(observer.passes) == 2


def test_a_stamp_of_another_stream_is_waited_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later of two marks may be passed first, if they are of two streams."""
    device = FakeDevice()
    device.install(monkeypatch)
    clock = DeviceClock(GPU)
    first, last = clock.stamp(), clock.stamp()
    device.queue.reverse()
    assert clock.seconds(first, last) == pytest.approx(-0.003)


def test_a_host_reads_its_own_clock() -> None:
    clock = HostClock()
    first = clock.stamp()
    assert clock.seconds(first, clock.stamp()) >= 0
    assert not clock.is_stopped


def test_who_computes_the_gradients_has_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(clock_of([CPU, CPU]), HostClock)
    assert isinstance(clock_of([]), HostClock)
    assert isinstance(clock_of([GPU, GPU]), DeviceClock)


@pytest.mark.parametrize("devices", [[CPU, GPU], [GPU, torch.device("cuda", 1)], [torch.device("xpu", 0)]])
def test_what_has_no_clock_is_told_so(devices: list[torch.device]) -> None:
    with pytest.raises(NotImplementedError, match=rf"parameters are on .*{devices[0]}.*Pass a number"):
        clock_of(devices)
