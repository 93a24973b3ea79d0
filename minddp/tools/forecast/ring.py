"""The cost of an all-reduce round a ring, on any number of ranks and hosts, from the cost of one hop.

A ring takes 2 (n-1) hops, each of 1/n of the bytes. Ranks are numbered host by host, so once around the ring as
many of the n hops cross as there are hosts. (Patarasuk and Yuan, 2009)
"""

from __future__ import annotations

import math

from minddp.tools.forecast.link import Link


def all_reduce(ranks: int, hosts: int, inside: Link, between: Link) -> Link:
    """The cost of messages: all hops of a round work at once, so the slowest of them decides.

    A hop is `inside` a host, between two of its ranks, or `between` the network interfaces of two hosts, each full
    duplex and shared by the ranks of its host.

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
