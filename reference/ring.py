r"""Inside one all-reduce: the ring, step by step, with ranks that are only arrays in memory.

    python -m reference.collectives --algorithm ring --ranks 4

The ladder treats the all-reduce as one call. This is the usual way to carry it out. The n ranks form a
circle and each sends only to the next one; the buffer is cut into n chunks.

1. *Reduce-scatter*, n-1 steps. Each rank passes one chunk on, and adds the chunk it receives to its own.
   Chunk c starts at rank c and gets one summand at each rank; at the last, rank c-1, it is complete.
2. *All-gather*, n-1 steps. The complete chunks go round once more, and overwrite instead of adding.

Cost. In each of the 2(n-1) steps a rank sends one chunk, B/n of its B bytes:

    bytes sent per rank = 2 (n-1)/n B < 2B      latencies = 2(n-1)

No all-reduce can send fewer bytes, and this one hardly grows with n: it is bandwidth-optimal (P. Patarasuk
and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib.
Comput. 69 (2009) 117-124). Compare: had every rank sent its buffer to every other, (n-1) B each. The
latencies do grow with n, which is why small messages are expensive, and why libraries use trees for them
(`collectives.py`).

Each chunk is summed once, along one path, and then copied: all ranks hold the same bits, though
floating-point addition depends on the order. That the order differs from chunk to chunk is why two
all-reduces of the same numbers, cut differently, may differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Transfer:
    """One message of one step: a range of chunks."""

    sender: int
    receiver: int
    chunks: range
    nbytes: int = 0  # of a plan: not known yet


@dataclass(frozen=True)
class Step:
    """What all ranks do at the same time, and `buffers[rank]` as it is afterwards.

    A receiver adds what arrives in the phases "reduce-scatter" and "reduce"; in all others it overwrites.
    """

    phase: str
    transfers: tuple[Transfer, ...]
    buffers: tuple[np.ndarray, ...] = ()  # of a plan: none yet


class Plan(NamedTuple):
    """The steps of an all-reduce over buffers that are cut into `chunks`."""

    chunks: int
    steps: Sequence[Step]


@dataclass(frozen=True)
class Run:
    """A complete all-reduce: the steps it took over buffers of `chunks` chunks, and `results[rank]`."""

    chunks: int
    steps: tuple[Step, ...]
    results: tuple[np.ndarray, ...]


def ring_all_reduce(inputs: Sequence[np.ndarray]) -> Run:
    """Sum `inputs` (one array per rank, all of one shape [size] and dtype); each rank gets the sum.

    Any dtype that can add will do, also `object`. The inputs are left as they are.
    """
    return carry_out(ring(len(inputs)), inputs)


def ring(n: int) -> Plan:
    """In each step every rank sends one chunk to the next rank."""
    steps = []
    for phase, first in (("reduce-scatter", 0), ("all-gather", 1)):
        for s in range(n - 1):
            chunks = [(rank + first - s) % n for rank in range(n)]
            transfers = (Transfer(rank, (rank + 1) % n, range(c, c + 1)) for rank, c in enumerate(chunks))
            steps.append(Step(phase, tuple(transfers)))
    return Plan(n, steps)


def carry_out(plan: Plan, inputs: Sequence[np.ndarray]) -> Run:
    """Do what `plan` says with copies of `inputs`."""
    require_like_buffers(inputs)
    buffers = [buffer.copy() for buffer in inputs]
    bounds = chunk_slices(len(buffers[0]), plan.chunks)
    steps = []
    for step in plan.steps:
        sent = [(t, [(bounds[c], buffers[t.sender][bounds[c]].copy()) for c in t.chunks]) for t in step.transfers]
        for t, payload in sent:  # all have been sent before any is received
            for where, values in payload:
                own = buffers[t.receiver][where]
                own[...] = own + values if step.phase.startswith("reduce") else values
        transfers = tuple(replace(t, nbytes=sum(values.nbytes for _, values in p)) for t, p in sent)
        steps.append(Step(step.phase, transfers, tuple(buffer.copy() for buffer in buffers)))
    return Run(plan.chunks, tuple(steps), tuple(buffers))


def chunk_slices(size: int, n: int) -> list[slice]:
    """`size` elements in `n` parts whose sizes differ by at most one; some are empty if `size < n`."""
    bounds = [size * i // n for i in range(n + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def require_like_buffers(inputs: Sequence[np.ndarray]) -> None:
    kinds = [f"{buffer.dtype}{list(buffer.shape)}" for buffer in inputs]
    if len(set(kinds)) != 1 or inputs[0].ndim != 1:
        raise ValueError(
            f"The ranks have {', '.join(kinds) or 'nothing'}. All need flat buffers of one size and dtype."
        )


def digits(ranks: int, chunks: int) -> list[np.ndarray]:
    """Rank r has a 1 in decimal place r, from the left: so the digits of a sum show the ranks in it."""
    return [np.full(chunks, 10 ** (ranks - 1 - rank), dtype=np.int64) for rank in range(ranks)]


def show(run: Run) -> None:
    """For inputs that are `digits`: what each rank sends, and its buffer after each step."""
    print("A chunk shows which ranks are in it: digit r, from the left, is 1 once rank r has been added.")
    print("→ it has just arrived; ✓ it is complete")
    for number, step in enumerate(run.steps, start=1):
        print(f"\nstep {number}, {step.phase}")
        print("   ".join(f"{t.sender} → {t.receiver}: {in_words(t.chunks)}" for t in step.transfers))
        for rank, buffer in enumerate(step.buffers):
            arrived = {chunk for t in step.transfers if t.receiver == rank for chunk in t.chunks}
            cells = [
                f"{'→' if chunk in arrived else ' '}{value:0{len(step.buffers)}d}{'✓' if value == total else ' '}"
                for chunk, (value, total) in enumerate(zip(buffer, run.results[0], strict=True))
            ]
            print(f"rank {rank:2}  {'  '.join(cells)}".rstrip())


def in_words(chunks: range) -> str:
    return f"chunk {chunks[0]}" if len(chunks) == 1 else f"chunks {chunks[0]}-{chunks[-1]}"
