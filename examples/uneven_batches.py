"""A check of the guard: ranks whose batches differ in size take a mean of means, not the mean over all samples.

    ddp.guard.checks["uneven batches"] = UnevenBatches()  # on every rank, before training

It notes the sizes of batches in the steps that the guard looks at. Rank 0 compares the notes of all ranks, in a
thread of its own, and logs one warning. It sends no collective and changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from minddp.tools.watchdog.check import Check, Finding, Notes


class UnevenBatches(Check):
    """The size is that of the first input's first dimension, summed over the forwards of a step."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # by step

    def before_module(self, step: int, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by the thread that trains."""
        self._sizes[step] = self._sizes.get(step, 0) + len(inputs[0])

    def take_notes(self, is_last: bool = False) -> Notes:
        """Called by the guard's thread. The latest step may go on."""
        steps = sorted(self._sizes)
        return [(step, self._sizes.pop(step)) for step in (steps if is_last else steps[:-1])]

    def compare(self, number: int, notes: Sequence[Any]) -> Iterable[Finding]:
        """Called on rank 0: `notes[rank]` is the size of that rank's batch in step `number`."""
        if len(set(notes)) > 1:
            sizes = ", ".join(f"{size} on rank {rank}" for rank, size in enumerate(notes))
            text = (
                f"Batches differ in size in step {number}: {sizes}. Then the mean of the ranks' gradients is not "
                f"the mean over all samples. Call `ddp.weigh(len(batch))` in each step, or drop the last batch."
            )
            yield Finding("uneven batches", "inputs", number, tuple(range(len(notes))), text)
