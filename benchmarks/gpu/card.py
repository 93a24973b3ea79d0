"""What a figure was measured on: the machine, and the card with all that its figures depend on."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import machine
from minddp.platform.cupy_beside_torch import NoCuPy, import_cupy


def described(device: str) -> dict[str, Any]:
    """Ready for JSON; on the CPU, where measurements are rehearsed, the machine alone."""
    about = machine.describe(device)
    if device == "cpu":
        return about
    card = torch.cuda.get_device_properties(0)
    return about | {
        "gpu_memory_gib": round(card.total_memory / 2**30, 1),
        "multiprocessors": card.multi_processor_count,
        "capability": f"{card.major}.{card.minor}",
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cupy": cupy_version(),
    }


def cupy_version() -> str:
    """Or why there is none."""
    try:
        return import_cupy().__version__
    except NoCuPy as obstacle:
        return f"none: {obstacle}"


def has_cupy() -> bool:
    return not cupy_version().startswith("none")
