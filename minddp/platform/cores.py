"""The cores that this process may use, which in a container are often fewer than the machine has."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

SCHEDULED = Path("/proc/thread-self/schedstat")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


class CoreTime(NamedTuple):
    """How long a thread has run on a core, and how long it has waited for one, in nanoseconds."""

    had_ns: int = 0
    waited_ns: int = 0

    def since(self, earlier: CoreTime) -> CoreTime:
        return CoreTime(self.had_ns - earlier.had_ns, self.waited_ns - earlier.waited_ns)


class CoreClock:
    """Core times of the thread that creates it. Only Linux counts the waits; elsewhere they are 0."""

    def __init__(self) -> None:
        self._file = SCHEDULED.open("rb", buffering=0) if SCHEDULED.exists() else None

    def read(self) -> CoreTime:
        waited = "0" if self._file is None else os.pread(self._file.fileno(), 100, 0).split()[1]
        return CoreTime(time.thread_time_ns(), int(waited))  # the run time in the file is updated late


def usable_cores() -> float:
    """The process's affinity, or the quota of its container if that is smaller."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(control_group("cpu.max"))
    return min(float(cores), quota) if quota else float(cores)


def cpu_quota(setting: str) -> float | None:
    """The number of cores that a control group's `cpu.max` grants; `None` if there is no limit."""
    numbers = setting.split()
    if len(numbers) != 2 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
        return None  # "max", or an unknown format
    quota, period = map(int, numbers)
    return quota / period


def control_group(*settings: str) -> str:
    """The container's value of the first of these settings that it has; empty if it has none."""
    return next(filter(None, (read_if_there(CONTROL_GROUPS / setting) for setting in settings)), "")


def read_if_there(path: Path) -> str:
    """The text of the file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
