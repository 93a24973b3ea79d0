"""Streams, events and pinned memory of a device, and which devices there are. The rest of minddp asks here.

An accelerator is only asked for an operation by its call, and runs it later, in the order of a *stream*. On the CPU
an operation is done when its call returns, so there are no streams. All is asked of `torch.get_device_module`, so
any accelerator that has streams is treated as CUDA devices are. Only `transport/nccl` asks for CUDA itself.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

# ---------------------------------------------------------------------- order


def has_streams(device: torch.device) -> bool:
    """True if an operation on `device` may run after its call has returned."""
    return device.type != "cpu" and hasattr(getattr(torch, device.type, None), "Stream")


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


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Once `tensor` is freed, the allocator waits for the current stream, too, before it uses the memory again."""
    if has_streams(tensor.device):
        tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))


def synchronize(device: torch.device) -> None:
    if has_streams(device):
        torch.get_device_module(device).synchronize(device)


def copied_to(device: torch.device, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """`values` on `device`, copied from pinned memory, so that the host does not wait for earlier operations."""
    on_host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=has_streams(device))
    return on_host.to(device, non_blocking=True)  # a no-op on the CPU


# ---------------------------------------------------------------------- which devices


def num_devices(kind: str) -> int:
    """How many devices of a type, such as "cuda", torch can use here."""
    return torch.get_device_module(kind).device_count()


def make_current(device: torch.device) -> None:
    """Let `device` be the one that is meant where none is named."""
    torch.get_device_module(device).set_device(device)


def is_there() -> bool:
    """True if torch can use an accelerator here."""
    return torch.accelerator.is_available()


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process has taken: its tensors on an accelerator; on the CPU, all that was resident."""
    if device.type == "cpu":
        return 2**10 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return torch.accelerator.max_memory_allocated(device)


def properties(device: torch.device) -> Any:
    return torch.get_device_module(device).get_device_properties(device)


def nccl_version() -> tuple[int, ...] | None:
    """Of the NCCL that torch was built with."""
    return torch.cuda.nccl.version() if dist.is_nccl_available() else None


def random_state(device: torch.device) -> torch.Tensor:
    return torch.get_device_module(device).get_rng_state(device)


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    torch.get_device_module(device).set_rng_state(state, device)
