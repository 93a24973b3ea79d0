"""How many cores this process may use, which in a container are often fewer than the machine has."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

SCHEDULED = Path("/proc/thread-self/schedstat")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


class CoreTime(NamedTuple):
    """How long a thread has had a core, and how long it has waited for one, in nanoseconds."""

    had_ns: int = 0
    waited_ns: int = 0

    def since(self, earlier: CoreTime) -> CoreTime:
        return CoreTime(self.had_ns - earlier.had_ns, self.waited_ns - earlier.waited_ns)


class CoreClock:
    """Core times of the thread that makes it. Only Linux counts the waits; elsewhere they are 0."""

    def __init__(self) -> None:
        self._file = SCHEDULED.open("rb", buffering=0) if SCHEDULED.exists() else None

    def read(self) -> CoreTime:
        waited = "0" if self._file is None else os.pread(self._file.fileno(), 100, 0).split()[1]
        return CoreTime(time.thread_time_ns(), int(waited))  # the file's own account of the first lags behind


def usable_cores() -> float:
    """Its affinity, and the quota that a container may have."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(control_group("cpu.max"))
    return min(float(cores), quota) if quota else float(cores)


def cpu_quota(setting: str) -> float | None:
    """Cores' worth of time, from what the control group says; `None` if there is no limit."""
    numbers = setting.split()
    if len(numbers) != 2 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
        return None  # "max", or nothing that can be understood
    quota, period = map(int, numbers)
    return quota / period


def control_group(*settings: str) -> str:
    """What the container says about the first of these settings that it has; empty if about none."""
    return next(filter(None, (read_if_there(CONTROL_GROUPS / setting) for setting in settings)), "")


def read_if_there(path: Path) -> str:
    """What the file says; empty if there is none."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
