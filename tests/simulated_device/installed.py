"""Puts a simulated device in the place of the CPU: in the seam through which minddp asks, and in torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from minddp.platform import streams
from minddp.transport import nccl, process_group
from minddp.transport.shared_memory import shared_memory_transport
from tests.simulated_device.collectives import ProcessGroupStream
from tests.simulated_device.device import Event, SimulatedDevice, Stream
from tests.simulated_device.nccl_of_cupy import connect_gpus
from tests.simulated_device.operations import Operations, copies

CPU = torch.device("cpu")
USED_OF_CUDA = ("Stream", "stream", "current_stream", "is_current_stream_capturing", "synchronize")


@contextmanager
def simulated_device() -> Iterator[SimulatedDevice]:
    """Within, "cpu" is a device with streams, and process groups are NCCL's."""
    device = SimulatedDevice()
    module = SimpleNamespace(
        Stream=lambda *_: Stream(device, f"{len(device.streams)}th"),
        Event=partial(Event, device),
        stream=device.on,
        current_stream=lambda *_: device.current,
        is_current_stream_capturing=lambda: False,
        synchronize=device.synchronize,
        get_device_properties=lambda *_: SimpleNamespace(name="simulated"),
    )
    real_module = torch.get_device_module
    replaced: list[tuple[Any, str, Any]] = [
        (streams, "has_streams", lambda _device: True),
        (torch, "get_device_module", lambda asked=None: module if asked == CPU else real_module(asked)),
        *((torch.cuda, name, getattr(module, name)) for name in USED_OF_CUDA),
        # PowerSGD synchronizes if there is CUDA
        (torch.cuda, "is_available", lambda: "powerSGD" in sys._getframe(1).f_code.co_filename),
        (torch.Tensor, "record_stream", lambda tensor, stream: device.memory_of(tensor).kept_for.add(stream)),
        (torch.futures, "wait_all", lambda futures: [future.wait() for future in futures]),
        (dist, "get_backend", lambda _group=None: "nccl"),
        # Also where it was imported: a first import within would keep the replacement
        (process_group, "backend_for", lambda _group, _device: None),
        (shared_memory_transport, "backend_for", lambda _group, _device: None),
        (nccl, "connect_gpus", lambda group, _device: connect_gpus(device, group)),
        *copies(device),
    ]
    with ExitStack() as stack:
        for place, name, value in replaced:
            stack.enter_context(mock.patch.object(place, name, value))
        stack.enter_context(Operations(device, ProcessGroupStream(device)))
        yield device
