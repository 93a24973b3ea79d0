"""The machine on which a figure was measured: enough to compare, nothing that identifies its owner."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from minddp.platform.host import usable_cores
from minddp.transport.nccl.nccl_transport import import_cupy


def describe(device: str = "cpu") -> dict[str, Any]:
    """CPU, GPU, memory, operating system and versions, ready for JSON. No host, user or path names."""
    return (describe_gpu() if device == "cuda" else {}) | {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def describe_gpu() -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": gpu.name,
        "gpus": torch.cuda.device_count(),
        "gpu_memory_gib": round(gpu.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cupy": cupy_version(),
    }


def cupy_version() -> str:
    """The version of CuPy, or "none" and the reason."""
    try:
        return import_cupy().__version__
    except ImportError as obstacle:
        return f"none: {obstacle}"


def cpu_model() -> str:
    """The processor's name as the system gives it; its architecture where it gives none."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def load_average() -> float:
    """Processes that wanted a core during the last minute: near 0 on a machine fit to measure on."""
    return round(os.getloadavg()[0], 2)
