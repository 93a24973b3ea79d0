"""The cores that this process may use, which in a container are often fewer than the machine has."""

from __future__ import annotations

import os
from pathlib import Path

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> float:
    """The process's affinity, or the quota of its container if that is smaller."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(read_if_there(CPU_QUOTA))
    return min(float(cores), quota) if quota else float(cores)


def cpu_quota(setting: str) -> float | None:
    """The number of cores that a control group's `cpu.max` grants; `None` if there is no limit."""
    numbers = setting.split()
    if len(numbers) != 2 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
        return None  # "max", or an unknown format
    quota, period = map(int, numbers)
    return quota / period


def read_if_there(path: Path) -> str:
    """The text of the file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
