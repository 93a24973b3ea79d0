"""Collectives of torch's process groups, as NCCL orders them.

The values come from gloo, at once; those of messages from rank to rank when they are waited for. On the simulated
device a collective runs on its communicator's stream:

    launch     the communicator's stream waits for the current one; the collective reads and writes there
    wait()     the current stream waits for the collective, the host does not
    future     is complete at once. A callback runs on a stream of its own, which waits for the collective; `wait()`
               lets the current stream wait for the collective, or for the callback whose future it is. Both keep
               the memory of the values for the stream that has waited (`torch::ivalue::Future` with devices)
    memory     the work refers to its tensors until it is waited for, as that of `ProcessGroupNCCL` by default
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.simulated_device.device import Event, SimulatedDevice, Stream
from tests.simulated_device.operations import on_device


class SimulatedFuture(torch.futures.Future):
    """Of values that are there once the device has passed `event`."""

    def __init__(self, device: SimulatedDevice, values: Any, event: Event):
        super().__init__()
        self.set_result(values)
        self._device, self._event = device, event

    def then(self, callback: Callable[[Any], Any]) -> SimulatedFuture:  # type: ignore[override]
        with self._device.on(Stream(self._device, f"callback's {len(self._device.streams)}th")):
            self._synchronize()
            return SimulatedFuture(self._device, callback(self), self._device.current.record_event())

    add_done_callback = then  # type: ignore[assignment]

    def wait(self) -> Any:
        self._synchronize()
        return self.value()

    def _synchronize(self) -> None:
        self._device.current.wait_event(self._event)
        for tensor in on_device(self.value()):
            self._device.memory_of(tensor).kept_for.add(self._device.current)


class SimulatedWork(dist.Work):
    """A collective on the stream of a process group's communicator. Gloo is yet to be waited for in `message`."""

    def __init__(
        self,
        device: SimulatedDevice,
        communicator: Stream,
        tensors: Sequence[torch.Tensor],
        message: dist.Work | None = None,
    ):
        super().__init__()
        self._message = message
        self._device, self._communicator, self._tensors = device, communicator, list(tensors)
        self._done = communicator.record_event()
        for tensor in tensors:
            device.memory_of(tensor).kept_for.add(communicator)

    def wait(self, timeout: object = None) -> bool:
        if self._message is not None:
            self._message.wait()
        self._device.current.wait_event(self._done)
        for tensor in self._tensors:
            self._device.memory_of(tensor).kept_for.discard(self._communicator)
        self._tensors = []
        return True

    def get_future(self) -> SimulatedFuture:
        return SimulatedFuture(self._device, self._tensors, self._done)


class ProcessGroupStream:
    """Notes collectives of torch's process groups, which share one communicator."""

    def __init__(self, device: SimulatedDevice):
        self._device = device
        self._communicator = Stream(device, "process group's")
        self._works: list[SimulatedWork] = []  # what C++ waits for must live in Python

    def __call__(self, operation: str, tensors: Sequence[torch.Tensor], call: Callable[[], Any]) -> Any:
        results = call()
        message = None
        if isinstance(results, torch.ScriptObject):  # to or from a rank, which may come to it later
            message, results = dist.Work.unbox(results), None
        else:
            dist.Work.unbox(results[-1]).wait()
        self._communicator.wait_stream(self._device.current)
        self._device.run(operation, self._communicator, [], map(self._device.place_of, tensors))
        self._works.append(SimulatedWork(self._device, self._communicator, tensors, message))
        boxed = self._works[-1].boxed()
        return boxed if results is None else (*results[:-1], boxed)
