"""The cost of an all-reduce on any number of ranks and hosts, from the cost of one hop. Pure arithmetic.

A hop is `inside` a host, between two of its ranks, or `between` the network interfaces of two hosts, each full
duplex and shared by the ranks of its host.

A ring takes 2 (n-1) hops, each of 1/n of the bytes. Ranks are numbered host by host, so once around the ring as
many of the n hops cross as there are hosts. (Patarasuk and Yuan, 2009)

[Note: cores]
A GPU's messages need no core (`cores` is None). On a CPU a core moves and adds the bytes, at the rate of a hop
inside. If a host has more ranks than cores, all computing and moving takes longer by their ratio; the network does
not. Without a spare core that work delays backward: see [Note: messages take time from backward].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from minddp.tools.forecast.link import Link


@dataclass(frozen=True)
class Cluster:
    """`ranks` on `hosts`, equally many on each; `cores` are those of one host. See [Note: cores].

    Raises:
        ValueError: the ranks cannot be divided equally among the hosts.
    """

    ranks: int
    hosts: int
    inside: Link
    between: Link
    cores: float | None = None

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks < 1 or self.ranks % self.hosts:
            raise ValueError(f"{self.ranks} ranks cannot be divided equally among {self.hosts} hosts.")

    @property
    def crowding(self) -> float:
        """How much longer a rank computes because it shares its core."""
        return 1.0 if self.cores is None else max(1.0, self.ranks / self.hosts / self.cores)

    @property
    def has_spare_cores(self) -> bool:
        return self.cores is None or self.ranks / self.hosts < self.cores


def all_reduce(cluster: Cluster) -> Link:
    """The cost of messages round a ring; `Link.taken` is the share of their work. See [Note: cores]."""
    passed = 2 * (cluster.ranks - 1) / cluster.ranks
    crossing = cluster.hosts if cluster.hosts > 1 else 0
    staying = cluster.ranks - crossing
    passed_inside, passed_between = passed * (staying > 0), passed * (crossing > 0)
    inside_s = staying * cluster.inside.latency_s * cluster.crowding
    latency_s = passed * (inside_s + crossing * cluster.between.latency_s)
    work_s = cluster.crowding / cluster.inside.bytes_per_s
    passed_by_core = passed_inside if cluster.cores is None else passed
    byte_s = max(passed_by_core * work_s, passed_between / cluster.between.bytes_per_s)
    if not byte_s:
        return Link(latency_s, math.inf)
    return Link(latency_s, 1 / byte_s, 0.0 if cluster.has_spare_cores else passed_by_core * work_s / byte_s)


def hop_of(measured: Link, cluster: Cluster) -> Link:
    """The hop with which an all-reduce on `cluster` takes as long as `measured`, if all hops cost the same.

    Raises:
        ValueError: there is only one rank.
    """
    if cluster.ranks < 2:
        raise ValueError("An all-reduce of one rank does not show the cost of a hop: measure two ranks at least.")
    unit = all_reduce(replace(cluster, inside=Link(1.0, 1.0), between=Link(1.0, 1.0)))
    return Link(measured.latency_s / unit.latency_s, measured.bytes_per_s / unit.bytes_per_s)
