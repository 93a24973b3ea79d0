"""Replaces torch.cuda and torch.accelerator: they report as many devices as there are ranks on this host."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from minddp.tools.launch.on_cpu.replacement import always, replace, say_once

NAME = "CPU (minddp --on-cpu)"


class Stream:
    """Replaces torch.cuda.Stream and torch.Stream. Work on it runs at once."""

    device = torch.device("cuda")
    wait_event = wait_stream = synchronize = __init__ = __exit__ = always(None)
    query = always(True)
    is_capturing = always(False)  # torch's optimizers ask

    def __enter__(self) -> Stream:
        return self


class CpuEvent:
    """Replaces torch.cuda.Event and torch.Event by a point in time."""

    def __init__(self, *_: Any, **__: Any):
        self._recorded_s = math.nan

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Milliseconds, or NaN if one of both was not recorded."""
        return (end_event._recorded_s - self._recorded_s) * 1e3

    wait = synchronize = always(None)
    query = always(True)


class Current:
    """The current device, and whether `torch.manual_seed` has seeded the CPU's generator."""

    device = 0
    is_seeded_by_torch = False

    def set_device(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        self.device = self.device if index is None or index < 0 else index

    def seed(self, seed: int) -> None:
        """Seed the CPU's generator, unless `torch.manual_seed` has: with a GPU, only that one affects the CPU."""
        if sys._getframe(1).f_globals["__name__"] == "torch.random":  # torch.manual_seed seeds all devices
            self.is_seeded_by_torch = True
        elif not self.is_seeded_by_torch:
            torch.default_generator.manual_seed(int(seed))


def install() -> None:
    """Replace the functions in `answers`. The other ones still raise."""
    of_streams, answering = {"Stream ExternalStream": Stream, "Event": CpuEvent}, answers(Current())
    replace(torch, of_streams)
    replace(torch.accelerator, answering)
    # This capability has bfloat16. The function of that name in torch.accelerator means something else.
    only_cuda = {"get_device_capability": always((8, 0)), "_lazy_init": raise_unknown}
    replace(torch.cuda, of_streams | answering | only_cuda)


def raise_unknown() -> None:
    raise RuntimeError("This call needs CUDA itself, and --on-cpu has no replacement for it: leave it out.")


def answers(current: Current) -> dict[str, Any]:
    """The functions of both modules. All devices are the same one, and all streams are the same one."""
    stream, context, nothing = Stream(), contextlib.nullcontext(), always(None)
    memory = psutil.virtual_memory().total
    return {
        "is_available": lambda: num_devices() > 0,
        "device_count": num_devices,
        "current_accelerator": lambda *_, **__: torch.device("cuda") if num_devices() else None,
        "set_device set_device_index set_device_idx": current.set_device,
        "current_device current_device_index current_device_idx": lambda: current.device,
        "current_stream default_stream": always(stream),
        "device device_index device_of stream StreamContext": always(context),
        "set_stream empty_cache synchronize init ipc_collect": nothing,
        "reset_peak_memory_stats reset_max_memory_allocated": nothing,
        "memory_allocated memory_reserved max_memory_allocated max_memory_reserved": resident_bytes,
        "get_device_properties": always(SimpleNamespace(name=NAME, total_memory=memory, major=8, minor=0)),
        "get_device_name": always(NAME),
        "is_initialized is_bf16_supported": always(True),
        "is_current_stream_capturing": always(False),
        "manual_seed manual_seed_all": current.seed,
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * num_devices(),
        "set_rng_state_all": lambda new_states: torch.set_rng_state(new_states[0]),
    }


def num_devices() -> int:
    """The number in CUDA_VISIBLE_DEVICES; else the local world size; else 2."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible:
        return 0 if visible.startswith("-1") else len(visible.split(","))
    return int(os.environ.get("LOCAL_WORLD_SIZE", "2"))


def resident_bytes(device: Any = None) -> int:
    """The memory of this process. It replaces a GPU's figures, including peaks."""
    say_once("memory figures are those of the whole process at present, and have no peaks.")
    return psutil.Process().memory_info().rss
