"""Streams, events and pinned memory of a device. Nothing but this file and `transport/nccl` asks for them.

An accelerator is only asked for an operation by its call, and runs it later, in the order of a *stream*. On the CPU
an operation is done when its call returns, so there are no streams. All is asked of `torch.get_device_module`, so
any accelerator that has streams is treated as CUDA devices are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch


def has_streams(device: torch.device) -> bool:
    """True if an operation on `device` may run after its call has returned."""
    return device.type != "cpu" and hasattr(getattr(torch, device.type, None), "Stream")


def new_stream(device: torch.device) -> torch.Stream:
    return torch.get_device_module(device).Stream(device)


def on_stream(stream: torch.Stream) -> AbstractContextManager[object]:
    """Operations that are called within run on `stream`."""
    return torch.get_device_module(stream.device).stream(stream)


def timed_event(device: torch.device) -> Any:
    """An event on the current stream, behind all that it was asked for. Two have an `elapsed_time`, in ms."""
    module = torch.get_device_module(device)
    event = module.Event(enable_timing=True)
    event.record(module.current_stream(device))
    return event


def is_capturing(device: torch.device) -> bool:
    """True if a graph records what the current stream is asked for, instead of running it."""
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and ask()


def copied_to(device: torch.device, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """`values` on `device`, copied from pinned memory, so that the host does not wait for earlier operations."""
    on_host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=has_streams(device))
    return on_host.to(device, non_blocking=True)  # a no-op on the CPU
