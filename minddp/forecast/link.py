"""What a message costs: a latency and a bandwidth, measured on the very group that will carry the gradients.

What it costs under a backward is another question: see [Note: calibration].
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from minddp.forecast.gradient_clock import Clock
from minddp.transport.protocols import Transport

_SIZES_BYTES = (1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23)
_REPEATS = 5


@dataclass(frozen=True)
class Link:
    """An all-reduce of n bytes takes `latency_s + n / bytes_per_s` seconds. (Hockney's model of a message.)

    Backward beside it stands still for the share `taken` of them, from 0 to 1. See [Note: what messages take from
    backward].
    """

    latency_s: float
    bytes_per_s: float
    taken: float = 0.0

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bytes_per_s

    @classmethod
    def fitted(cls, samples: Iterable[tuple[int, float]]) -> Link:
        """Least squares through (bytes, seconds), weighted so that all sizes count by their relative error.

        Raises:
            ValueError: fewer than two sizes.
        """
        points = [(float(nbytes), seconds) for nbytes, seconds in samples]
        if len({nbytes for nbytes, _ in points}) < 2:
            raise ValueError("A latency and a bandwidth need messages of two sizes at least.")
        weights = [1 / seconds**2 for _, seconds in points]
        total = sum(weights)
        mean_n = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
        mean_s = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
        covariance = sum(w * (n - mean_n) * (s - mean_s) for w, (n, s) in zip(weights, points, strict=True))
        variance = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, points, strict=True))
        seconds_per_byte = max(covariance / variance, 1e-15)
        return cls(max(mean_s - seconds_per_byte * mean_n, 0.0), 1 / seconds_per_byte)

    @classmethod
    def measured(
        cls,
        transport: Transport,
        device: torch.device,
        clock: Clock,
        sizes_bytes: Sequence[int] = _SIZES_BYTES,
    ) -> Link:
        """All-reduce some tensors and fit. Collective; takes a fraction of a second; the same on all ranks."""
        samples = []
        for nbytes in sizes_bytes:
            tensor = transport.allocate(nbytes // 4, torch.float32, device).zero_()
            samples.append((nbytes, statistics.median(_seconds_of_all_reduces(transport, tensor, clock))))
        own = torch.tensor([seconds for _, seconds in samples], dtype=torch.float64, device=device)
        slowest = torch.stack(list(transport.all_gather(own))).amax(0).tolist()
        return cls.fitted(zip(sizes_bytes, slowest, strict=True))


def _seconds_of_all_reduces(transport: Transport, tensor: torch.Tensor, clock: Clock) -> list[float]:
    """What each of several took, one after the other. A GPU is asked for all of them first, as in a backward."""
    stamps = [clock.stamp()]
    for _ in range(_REPEATS):
        transport.all_reduce(tensor).wait()
        stamps.append(clock.stamp())
    return [clock.seconds(first, last) for first, last in itertools.pairwise(stamps)]
