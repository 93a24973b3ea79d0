r"""Inside one all-reduce: the ring, step by step, with ranks that are only arrays in memory.

    python -m reference.ring --ranks 4

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
latencies do grow with n, which is why small messages are expensive, and why libraries use trees for them.

Each chunk is summed once, along one path, and then copied: all ranks hold the same bits, though
floating-point addition depends on the order. That the order differs from chunk to chunk is why two
all-reduces of the same numbers, cut differently, may differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Literal

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

Phase = Literal["reduce-scatter", "all-gather"]


@dataclass(frozen=True)
class Transfer:
    """One message of one step."""

    sender: int
    receiver: int
    chunk: int
    nbytes: int


@dataclass(frozen=True)
class Step:
    """What all ranks do at the same time, and `buffers[rank]` as it is afterwards."""

    phase: Phase
    transfers: tuple[Transfer, ...]
    buffers: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class RingRun:
    """A complete all-reduce: the steps it took, and `results[rank]`."""

    steps: tuple[Step, ...]
    results: tuple[np.ndarray, ...]

    def bytes_sent_by(self, rank: int) -> int:
        return sum(t.nbytes for step in self.steps for t in step.transfers if t.sender == rank)


def ring_all_reduce(inputs: Sequence[np.ndarray]) -> RingRun:
    """Sum `inputs` (one array per rank, all of one shape [size] and dtype); each rank gets the sum.

    Any dtype that can add will do, also `object`: `provenance.py` sends symbols round the ring. The inputs
    are left as they are.
    """
    require_like_buffers(inputs)
    n = len(inputs)
    buffers = [buffer.copy() for buffer in inputs]
    steps = []
    for s in range(n - 1):
        steps.append(take_step("reduce-scatter", buffers, [(rank - s) % n for rank in range(n)]))
    for s in range(n - 1):
        steps.append(take_step("all-gather", buffers, [(rank + 1 - s) % n for rank in range(n)]))
    return RingRun(tuple(steps), tuple(buffers))


def take_step(phase: Phase, buffers: list[np.ndarray], chunk_of_sender: list[int]) -> Step:
    """Each rank sends chunk `chunk_of_sender[rank]` of its buffer to the next rank, all at once.

    "At once" needs no care here: the chunk a rank receives is never the one it sends.
    """
    n = len(buffers)
    chunks = chunk_slices(len(buffers[0]), n)
    transfers = []
    for sender, chunk in enumerate(chunk_of_sender):
        receiver = (sender + 1) % n
        payload, own = buffers[sender][chunks[chunk]], buffers[receiver][chunks[chunk]]
        own[...] = own + payload if phase == "reduce-scatter" else payload
        transfers.append(Transfer(sender, receiver, chunk, payload.nbytes))
    return Step(phase, tuple(transfers), tuple(buffer.copy() for buffer in buffers))


def chunk_slices(size: int, n: int) -> list[slice]:
    """`size` elements in `n` parts whose sizes differ by at most one; some are empty if `size < n`."""
    bounds = [size * i // n for i in range(n + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def optimal_bytes_sent(n: int, nbytes: int) -> Fraction:
    """The least any all-reduce of `nbytes` over `n` ranks can make each rank send: 2(n-1)/n of them."""
    return Fraction(2 * (n - 1) * nbytes, n)


def require_like_buffers(inputs: Sequence[np.ndarray]) -> None:
    if not inputs:
        raise ValueError("No ranks: `inputs` is empty. Give one array per rank.")
    for rank, buffer in enumerate(inputs):
        if buffer.ndim != 1 or buffer.shape != inputs[0].shape or buffer.dtype != inputs[0].dtype:
            raise ValueError(
                f"Rank {rank} has {buffer.dtype}{list(buffer.shape)}, rank 0 {inputs[0].dtype}"
                f"{list(inputs[0].shape)}. All ranks need flat buffers of one size and dtype."
            )


def show(run: RingRun, console: Console) -> None:
    """Print what each rank sends, and the state after each step; finished chunks (equal to the result) in green."""
    for index, step in enumerate(run.steps):
        console.print(f"\n[bold]step {index + 1}, {step.phase}[/bold]")
        console.print("   ".join(f"{t.sender} → {t.receiver}: chunk {t.chunk}" for t in step.transfers))
        console.print(state_table(step, result=run.results[0]))


def state_table(step: Step, result: np.ndarray) -> Table:
    """A row per rank, a column per chunk; → marks what has just arrived."""
    n = len(step.buffers)
    width = len(str(result.max()))
    arrived = {(t.receiver, t.chunk) for t in step.transfers}
    table = Table("rank", *(f"chunk {chunk}" for chunk in range(n)), box=None, padding=(0, 2))
    for rank, buffer in enumerate(step.buffers):
        cells = []
        for chunk, where in enumerate(chunk_slices(len(buffer), n)):
            mark = "→" if (rank, chunk) in arrived else " "
            text = mark + ",".join(f"{value:0{width}d}" for value in buffer[where])
            cells.append(f"[green]{text}[/green]" if np.array_equal(buffer[where], result[where]) else text)
        table.add_row(str(rank), *cells)
    return table


def main(ranks: int = 4) -> None:
    """Show a ring all-reduce step by step.

    Args:
        ranks: number of ranks in the ring, 2 to 16.
    """
    if not 2 <= ranks <= 16:
        raise SystemExit(f"--ranks is {ranks}. Choose 2 to 16: one is no ring, more do not fit on a screen.")
    console = Console()
    # Each rank starts with a 1 in a decimal place of its own, so the digits of a sum show the ranks in it.
    inputs = [np.full(ranks, 10 ** (ranks - 1 - rank), dtype=np.int64) for rank in range(ranks)]
    run = ring_all_reduce(inputs)
    nbytes = inputs[0].nbytes
    console.print("A chunk shows which ranks are in it: digit r, from the left, is 1 once rank r has been added.")
    show(run, console)
    console.print(f"\nTo sum a buffer of {nbytes} bytes each rank sent {run.bytes_sent_by(0)} bytes,")
    optimum = optimal_bytes_sent(ranks, nbytes)
    console.print(f"in {len(run.steps)} messages. The least possible: 2(n-1)/n x {nbytes} = {optimum} bytes.")


if __name__ == "__main__":
    tyro.cli(main)
