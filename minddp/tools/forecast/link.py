"""The cost of a message: a latency and a bandwidth, fitted to measured times. The one model of a link in minddp.

The cost of one hop gives that of an all-reduce round a ring, on any number of ranks and hosts.
"""

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


# ---------------------------------------------------------------------- round a ring of ranks


def all_reduce(ranks: int, hosts: int, inside: Link, between: Link) -> Link:
    """The cost of messages round a ring: 2 (n-1) hops, each of 1/n of the bytes (Patarasuk and Yuan, 2009).

    All hops of a round work at once, so the slowest of them decides. A hop is `inside` a host, between two of its
    ranks, or `between` the network interfaces of two hosts, each full duplex and shared by the ranks of its host.
    Ranks are numbered host by host, so once around the ring as many of the n hops cross as there are hosts.

    Raises:
        ValueError: the ranks cannot be divided equally among the hosts.
    """
    if hosts < 1 or ranks < 1 or ranks % hosts:
        raise ValueError(f"{ranks} ranks cannot be divided equally among {hosts} hosts.")
    passed = 2 * (ranks - 1) / ranks
    crossing = hosts if hosts > 1 else 0
    hops = [between] * crossing + [inside] * (ranks - crossing)
    s_per_byte = passed * max(1 / hop.bytes_per_s for hop in hops)
    return Link(passed * sum(hop.latency_s for hop in hops), 1 / s_per_byte if s_per_byte else math.inf)


def hop_of(measured: Link, ranks: int) -> Link:
    """The hop with which an all-reduce of so many ranks takes as long as `measured`, if all hops cost the same.

    Raises:
        ValueError: there is only one rank.
    """
    if ranks < 2:
        raise ValueError("An all-reduce of one rank does not show the cost of a hop: measure two ranks at least.")
    return Link(measured.latency_s / (2 * (ranks - 1)), measured.bytes_per_s * 2 * (ranks - 1) / ranks)
