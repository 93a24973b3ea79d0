"""The cost of a message: a latency and a bandwidth, fitted to measured times. The one model of a link in minddp."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from minddp.tools.forecast.gradient_clock import Clock
from minddp.transport.protocols import Transport

_SIZES_BYTES = (1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23)
_REPEATS = 5
LEAST_S_PER_BYTE = 1e-15  # where larger messages take no longer


@dataclass(frozen=True)
class Link:
    """An all-reduce of n bytes, or one hop, takes `latency_s + n / bytes_per_s` seconds (Hockney, 1994).

    Backward is blocked for the share `taken`, from 0 to 1: see [Note: messages take time from backward].
    """

    latency_s: float
    bytes_per_s: float
    taken: float = 0.0

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bytes_per_s


FREE = Link(0.0, math.inf)


def fit_link(seconds_of_bytes: Mapping[int, float]) -> Link:
    """The line through the times of messages of two or more sizes with the least squares of relative errors."""
    nbytes, seconds = np.array([*seconds_of_bytes], dtype=float), np.array([*seconds_of_bytes.values()])
    s_per_byte, latency_s = np.polyfit(nbytes, seconds, 1, w=1 / seconds)
    return Link(max(0.0, float(latency_s)), 1 / max(LEAST_S_PER_BYTE, float(s_per_byte)))


def measure_link(transport: Transport, device: torch.device, clock: Clock) -> Link:
    """All-reduce tensors of several sizes and fit, by the slowest rank. Collective."""
    medians = []
    for nbytes in _SIZES_BYTES:
        tensor = transport.allocate(nbytes // 4, torch.float32, device).zero_()
        stamps = [clock.stamp()]
        for _ in range(_REPEATS):  # on a GPU all are enqueued before one is read, as in a backward
            transport.all_reduce(tensor).wait()
            stamps.append(clock.stamp())
        medians.append(statistics.median(clock.seconds(*ends) for ends in itertools.pairwise(stamps)))
    own = torch.tensor(medians, dtype=torch.float64, device=device)
    slowest = torch.stack(list(transport.all_gather(own))).amax(0).tolist()
    return fit_link(dict(zip(_SIZES_BYTES, slowest, strict=True)))
