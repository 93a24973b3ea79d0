"""`python -m reference`: climb the ladder on a few ranks of this machine, and print what each rung did.

Every rung wraps the same model in real processes over gloo; its gradients must equal the oracle's. The exit
status is 1 if one does not.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import spawn

from reference.bucketed import MIB
from reference.ladder import Measurement, climb


def table_of(measurements: list[Measurement]) -> Table:
    table = Table()
    for heading in ("rung", "messages\nper step", "MiB\nper step", "launched\nin backward"):
        table.add_column(heading, justify="left" if heading == "rung" else "right")
    table.add_column("exposed,\nms", justify="right")
    table.add_column("largest difference\nfrom the oracle", justify="right")
    for m in measurements:
        in_backward = f"{m.launched_in_backward} of {m.messages}"
        mib = f"{m.nbytes / MIB:.2f}"
        table.add_row(m.rung, f"{m.messages}", mib, in_backward, f"{m.exposed_ms:.2f}", f"{m.difference:.1e}")
    return table


def beyond(tolerance: float, measurements: list[Measurement]) -> list[str]:
    """The rungs that differ from the oracle by more than rounding explains; NaN counts as a difference."""
    return [m.rung for m in measurements if not m.difference <= tolerance]


def main(ranks: int = 2, rounds: int = 10) -> None:
    """Climb the ladder: every rung on the same model, checked against the oracle.

    Args:
        ranks: how many processes, 1 or more.
        rounds: how many timed steps per rung, 1 or more.
    """
    if ranks < 1 or rounds < 1:
        raise SystemExit(f"--ranks {ranks} --rounds {rounds}: both must be 1 or more.")
    results: SimpleQueue = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        spawn(climb, (ranks, rounds, str(Path(folder, "store")), results), nprocs=ranks)
    largest_gradient, measurements = results.get()

    console = Console()
    console.print(table_of(measurements))
    console.print(f"{ranks} ranks over gloo; the largest element of the gradient is {largest_gradient:.1e}.")
    console.print(f"Exposed: backward with synchronisation less backward without, median of {rounds}.")
    tolerance = ranks * torch.finfo(torch.float32).eps * largest_gradient  # one rounding per summand
    if wrong := beyond(tolerance, measurements):
        raise SystemExit(f"Not the oracle's gradient, by more than {tolerance:.1e}: {', '.join(wrong)}.")


if __name__ == "__main__":
    tyro.cli(main)
