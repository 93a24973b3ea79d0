"""Random states that are functions of numbers, such as a step and a share, not of earlier draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch


def seed_all(*numbers: int) -> None:
    """Seed torch, numpy and Python from these numbers."""
    digest = blake2b("/".join(map(str, numbers)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    torch.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)


@contextmanager
def random_state_is_kept(device: torch.device | None = None) -> Iterator[None]:
    """Random numbers drawn inside the block do not affect the state outside."""
    devices = [device.index] if device is not None and device.type != "cpu" else []
    device_type = {"device_type": device.type} if device is not None and devices else {}
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices, **device_type):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
