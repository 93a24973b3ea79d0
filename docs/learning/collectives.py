"""When which all-reduce is the fastest: counts of `reference/collectives.py` on two wires with assumed speeds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from minddp.tools.xray import words
from reference.collectives import algorithms
from reference.ring import Plan

KIB = 2**10
RANKS = (4, 6, 8, 16, 32, 48, 64)
SIZES = tuple(KIB * 16**power for power in range(6))  # 1 KiB to 1 GiB
PER_HOST = 8


class Wire(NamedTuple):
    """Assumed, not measured: orders of magnitude of a good machine."""

    latency_s: float
    bytes_per_s: float


LOCAL = Wire(3e-6, 200e9)
NETWORK = Wire(15e-6, 40e9)


@dataclass(frozen=True)
class Cost:
    """Counted from the steps; `shares` are of the buffer, so that one count serves all sizes.

    A step that sends nothing between hosts has local terms; another one terms of the network, which the ranks of
    a host share.
    """

    local_latencies: int
    local_shares: float
    network_latencies: int
    network_shares: float


def cost(plan: Plan, per_host: int) -> Cost:
    """A step lasts as long as the sender with the most bytes in it: a rank, or on the network a host."""
    latencies = {"local": 0, "network": 0}
    shares = {"local": 0.0, "network": 0.0}
    for step in plan.steps:
        by_rank, by_host = Counter[int](), Counter[int]()
        for t in step.transfers:
            by_rank[t.sender] += len(t.chunks)
            if t.sender // per_host != t.receiver // per_host:
                by_host[t.sender // per_host] += len(t.chunks)
        kind = "network" if by_host else "local"
        latencies[kind] += 1
        shares[kind] += max((by_host or by_rank).values()) / plan.chunks
    return Cost(latencies["local"], shares["local"], latencies["network"], shares["network"])


@cache
def counted(name: str, ranks: int, per_host: int) -> Cost:
    return cost(algorithms(per_host)[name](ranks), per_host)


def seconds(name: str, ranks: int, per_host: int, nbytes: int) -> float:
    c = counted(name, ranks, per_host)
    return (
        c.local_latencies * LOCAL.latency_s
        + c.local_shares * nbytes / LOCAL.bytes_per_s
        + c.network_latencies * NETWORK.latency_s
        + c.network_shares * nbytes / NETWORK.bytes_per_s
    )


def names(per_host: int) -> list[str]:
    return [name for name in algorithms(per_host) if per_host > 1 or name != "hierarchical"]


def fastest(ranks: int, per_host: int, nbytes: int) -> str:
    return min(names(per_host), key=lambda name: seconds(name, ranks, per_host, nbytes))


def costs(_rank: int) -> str:
    """Latencies and bytes of each algorithm, counted from its steps."""
    rows = [f"{'ranks':>5}" + "".join(f"{name:>18}" for name in names(1))]
    for ranks in RANKS:
        of = [counted(name, ranks, 1) for name in names(1)]
        cells = [f"{c.network_latencies} x a + {c.network_shares:.2f} B" for c in of]
        rows.append(f"{ranks:5}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(rows)


def winners(_rank: int) -> str:
    """The fastest for each number of ranks and size of the message."""
    blocks = []
    for per_host in (1, PER_HOST):
        rows = [f"{per_host} per host" + "".join(f"{words.size(nbytes):>14}" for nbytes in SIZES)]
        for ranks in RANKS:
            if ranks % per_host == 0 and ranks > per_host:
                cells = "".join(f"{fastest(ranks, per_host, nbytes):>14}" for nbytes in SIZES)
                rows.append(f"{ranks:4} ranks" + cells)
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks)


def draw(path: Path) -> None:
    """Time over size, for three numbers of ranks; then on hosts of 8."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 4, figsize=(13, 3.6), sharey=True)
    sizes = [KIB * 2**power for power in range(21)]
    colours = dict(zip(algorithms(1), ("#1f77b4", "#8c564b", "#2ca02c", "#ff7f0e", "#d62728"), strict=True))
    for panel, (ranks, per_host) in zip(panels, ((8, 1), (48, 1), (64, 1), (64, PER_HOST)), strict=True):
        for name in names(per_host):
            times = [1e3 * seconds(name, ranks, per_host, nbytes) for nbytes in sizes]
            panel.loglog([nbytes / 2**20 for nbytes in sizes], times, label=name, color=colours[name])
        panel.set_title(f"{ranks} ranks, {per_host} per host")
        panel.set_xlabel("MiB")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("ms, from counted steps\nand assumed wires")
    panels[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
