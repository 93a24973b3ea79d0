"""How many cores this process may use, which in a container are often fewer than the machine has."""

from __future__ import annotations

import os
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")


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
