"""What a device has done: for how long, and how many kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def stopwatch(device: str) -> Iterator[list[float]]:
    """Yields a list whose only element is, afterwards, how many seconds the device took."""
    took: list[float] = []
    if device == "cpu":
        began = time.perf_counter()
        yield took
        took.append(time.perf_counter() - began)
        return
    torch.cuda.synchronize()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    yield took
    last.record()
    torch.cuda.synchronize()
    took.append(first.elapsed_time(last) / 1e3)


def work_of(step: Callable[[], object]) -> dict[str, int]:
    """How many kernels one step launches, and how often it has memory copied or set."""
    if not torch.cuda.is_available():
        step()
        return {"launches": 0, "copies": 0}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    return counted(profiled.events())


def counted(events: Iterable[Any]) -> dict[str, int]:
    """Of a profile's `events`, what the device has done.

    Counted there, not where the host asks: torch launches through the runtime, CuPy and NCCL through the driver,
    and a profile may hold one launch twice. A span that the host has named is among the device's events, too.
    """
    seen = list(events)
    on_host = {event.name for event in seen if event.device_type.name == "CPU"}
    on_device = [e.name for e in seen if e.device_type.name == "CUDA" and e.name not in on_host]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in on_device)
    return {"launches": len(on_device) - copies, "copies": copies}
