"""The cores that this process may use, which in a container are often fewer than the machine has."""

from __future__ import annotations

import os
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")


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
