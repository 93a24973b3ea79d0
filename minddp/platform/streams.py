"""Streams, events, pinned memory and properties of devices, for any accelerator that has streams.

A call only enqueues an operation on an accelerator, which runs it later, in the order of a *stream*. On the CPU an
operation is done when its call returns, so there are no streams. Only `transport/nccl` depends on CUDA itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

# ---------------------------------------------------------------------- order


def has_streams(device: torch.device) -> bool:
    """True if an operation on `device` may run after its call has returned."""
    return device.type != "cpu" and hasattr(getattr(torch, device.type, None), "Stream")


def timed_event(device: torch.device) -> Any:
    """An event behind all operations of the current stream. Two events have an `elapsed_time`, in ms."""
    module = torch.get_device_module(device)
    event = module.Event(enable_timing=True)
    event.record(module.current_stream(device))
    return event


def is_capturing(device: torch.device) -> bool:
    """True while a graph captures the operations of the current stream instead of running them."""
    if not has_streams(device):
        return False
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and ask()


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """After `tensor` is freed, the allocator waits for the current stream before it reuses the memory."""
    if has_streams(tensor.device):
        tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))


def copied_to(device: torch.device, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """`values` on `device`, copied from pinned memory, so that the host does not wait for earlier operations."""
    on_host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=has_streams(device))
    return on_host.to(device, non_blocking=True)  # a no-op on the CPU


# ---------------------------------------------------------------------- which devices


def num_devices(kind: str) -> int:
    """The number of devices of a type, such as "cuda", that torch can use."""
    return torch.get_device_module(kind).device_count()


def properties(device: torch.device) -> Any:
    return torch.get_device_module(device).get_device_properties(device)


def nccl_version() -> tuple[int, ...] | None:
    """The version of NCCL with which torch was built."""
    return torch.cuda.nccl.version() if dist.is_nccl_available() else None
