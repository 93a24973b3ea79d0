"""The simulated device itself: what it takes for a race, for memory given away too early and for a host wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.simulated_device.collectives import SimulatedFuture
from tests.simulated_device.device import SimulatedDevice, Stream
from tests.simulated_device.installed import simulated_device

CPU = torch.device("cpu")


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulated_device() as device:
        yield device


@pytest.fixture
def other(device: SimulatedDevice) -> Stream:
    return Stream(device, "other")


# ------------------------------------------------------------------ order


def test_two_streams_without_an_event_race(device: SimulatedDevice, other: Stream) -> None:
    tensor = torch.zeros(8)
    with device.on(other):
        tensor.add_(1)
    [error] = device.errors
    assert "race: aten.zeros.default writes bytes 0 to 32 on the default stream" in error
    assert "aten.add_.Tensor writes bytes 0 to 32 on the other stream" in error
    here = "tests/simulated_device/test_device.py:"
    assert error.count(here) == 3, "both operations and the allocation"


def test_an_event_orders_what_was_asked_for_before_it(device: SimulatedDevice, other: Stream) -> None:
    tensor = torch.zeros(8)
    event = device.current.record_event()
    late = torch.zeros(8)
    other.wait_event(event)
    with device.on(other):
        tensor.add_(1)
        assert device.errors == []
        late.add_(1)
    assert len(device.errors) == 1


def test_order_is_passed_on(device: SimulatedDevice, other: Stream) -> None:
    third = Stream(device, "third")
    tensor = torch.zeros(8)
    other.wait_stream(device.current)
    third.wait_stream(other)
    with device.on(third):
        tensor.add_(1)
    assert device.errors == []


@pytest.mark.parametrize(("first", "second", "races"), [((0, 4), (4, 8), False), ((0, 5), (4, 8), True)])
def test_only_the_same_bytes_collide(
    first: tuple[int, int], second: tuple[int, int], races: bool, device: SimulatedDevice, other: Stream
) -> None:
    buffer = torch.zeros(8)
    other.wait_stream(device.current)
    buffer[slice(*first)].fill_(1)
    with device.on(other):
        buffer[slice(*second)].fill_(2)
    assert bool(device.errors) == races


def test_two_reads_and_views_do_not_collide(device: SimulatedDevice, other: Stream) -> None:
    tensor = torch.zeros(8)
    other.wait_stream(device.current)
    kept = [tensor + 1]
    with device.on(other):
        kept += [tensor + 1, tensor.view(2, 4).t()[1:]]
    tensor.view(4, 2)
    assert device.errors == []


WRITES: dict[str, Any] = {
    "in place": lambda a, b: a.mul_(b),
    "out": lambda a, b: torch.mul(b, b, out=a),
    "foreach": lambda a, b: torch._foreach_copy_([a], [b]),
    "copy": lambda a, b: a.copy_(b),
    "item": lambda a, b: a[0].fill_(1),
    "autograd": lambda a, b: b.requires_grad_().sum().backward() or a.add_(b.grad),
}


@pytest.mark.parametrize("write", WRITES)
def test_ways_to_write(write: str, device: SimulatedDevice, other: Stream) -> None:
    a, b = torch.zeros(8), torch.zeros(8)
    kept = a + 1
    other.wait_stream(device.current)
    kept = a + kept  # a read that the other stream does not wait for
    with device.on(other):
        WRITES[write](a, b)
        other_reads_b = b.detach() + 1
    [error] = device.errors
    assert "aten.add.Tensor reads" in error
    device.current.wait_stream(other)
    del other_reads_b


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("prevented_by", ["nothing", "record_stream", "a wait"])
def test_memory_that_another_stream_uses_is_not_to_be_freed(
    prevented_by: str, device: SimulatedDevice, other: Stream
) -> None:
    tensor = torch.zeros(8)
    other.wait_stream(device.current)
    with device.on(other):
        kept = tensor + 1
    if prevented_by == "record_stream":
        tensor.record_stream(other)
    if prevented_by == "a wait":
        device.current.wait_stream(other)
    del tensor
    if prevented_by == "nothing":
        [error] = device.errors
        assert error.startswith("freed too early: aten.add.Tensor reads bytes 0 to 32 on the other stream")
        assert "the default stream, on which this was allocated at" in error
    else:
        assert device.errors == []
    del kept


def test_a_future_keeps_its_value_for_a_stream_that_waits(device: SimulatedDevice, other: Stream) -> None:
    with device.on(other):
        value = torch.zeros(8)
    future = SimulatedFuture(device, [value], other.record_event())
    doubled = future.then(lambda done: done.value()[0] * 2)
    sum_of_both = doubled.wait() + future.wait()[0]
    assert device.errors == []
    del value, future, doubled
    assert device.errors == []
    del sum_of_both


def test_a_futures_value_is_not_waited_for_by_asking_for_it(device: SimulatedDevice, other: Stream) -> None:
    with device.on(other):
        value = torch.zeros(8)
    kept = SimulatedFuture(device, value, other.record_event()).value() + 1
    assert len(device.errors) == 1
    device.synchronize()
    del value, kept


# ------------------------------------------------------------------ the host

WAITS: dict[str, Any] = {
    "item": lambda tensor: tensor[0].item(),
    "bool": lambda tensor: bool(tensor[0] > 0),
    "tolist": lambda tensor: tensor.tolist(),
    "numpy": lambda tensor: tensor.numpy(),
    "cpu": lambda tensor: tensor.cpu(),
    "to": lambda tensor: tensor.to("cpu"),
    "nonzero": lambda tensor: tensor.nonzero(),
    "mask": lambda tensor: tensor[tensor > 0],
    "values": lambda tensor: torch.tensor([1.0], device=tensor.device),
    "not pinned": lambda tensor: torch.tensor([1.0]).to(tensor.device, non_blocking=True),
    "pinned, and blocks": lambda tensor: torch.tensor([1.0], pin_memory=True).to(tensor.device),
}


@pytest.mark.parametrize("wait", WAITS)
def test_the_host_waits(wait: str, device: SimulatedDevice) -> None:
    tensor = torch.ones(8)
    WAITS[wait](tensor)
    assert device.waits == [], "before a step"
    device.forward_begins()
    tensor.add_(1)
    WAITS[wait](tensor)
    assert len(device.waits) == 1
    assert "test_device.py" in device.waits[0]
    device.step_ends()
    WAITS[wait](tensor)
    assert len(device.waits) == 1


def test_the_host_does_not_wait(device: SimulatedDevice, other: Stream) -> None:
    device.forward_begins()
    torch.ones(8).add_(1)
    torch.tensor([1.0], device="cpu", pin_memory=True).to(CPU, non_blocking=True)
    count = torch.tensor(0.0)  # as an optimizer's, on the host
    count += 1
    assert count.item() == 1.0
    with device.on(other):
        assert torch.zeros(1).item() == 0.0  # on a stream that has not waited for the forward's
    assert device.waits == []


def test_what_the_host_has_waited_for_precedes_all_that_follows(device: SimulatedDevice, other: Stream) -> None:
    tensor = torch.zeros(8)
    device.synchronize()
    with device.on(other):
        tensor.add_(1)
    assert device.errors == []
    del tensor
    assert len(device.errors) == 1, "but not what comes after the wait"
