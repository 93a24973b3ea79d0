"""Is the wrapper used as intended? Forward has to run through it, and each rank needs its own data.

[Note: averaging by oneself]
A script may train without synchronised backwards: it averages gradients itself, or parameters from time to time
(local SGD). So `ALONE` optimizer steps are no finding by themselves. The replicas must also have become different,
and must not have had a common value since, even after different numbers of steps: a rank may run out of inputs, or
skip a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from minddp.core.autograd import tensors_in
from minddp.platform.wording import count, names, ranks
from minddp.tools.watchdog.check import ALONE, Check, Finding, Notes
from minddp.tools.watchdog.fingerprint import Reading

HEAD_BYTES = 64  # of a parameter
BATCHES = 8
FEWEST_DIFFERENT = 4  # of these batches: a batch that never changes is a benchmark
FEWEST_ELEMENTS = 8  # of a batch: fewer may be an option, such as the number of the step
BATCH_BYTES = 16 * 1024  # of each tensor
CALL_THE_WRAPPER = (
    "Call the wrapper, not `ddp.module` or the bare module, compute the loss from what it returns, and leave "
    "`no_sync` for the last backward before each step."
)
NamedParams = Sequence[tuple[str, torch.nn.Parameter]]


class BypassCheck(Check):
    """Does forward run through the wrapper, outside of `no_sync`? `params` are on one device."""

    def __init__(self, params: NamedParams):
        self._params = params
        self.first_gradient(-1, 0)

    def first_gradient(self, step: int, optimizer_steps: int) -> None:
        self._since = step
        self._forwards = [0, 0]  # outside of `no_sync`, and within it
        self._steps = 0  # of the optimizer that was the first to step
        self._heads: list[Reading] = []

    def post_forward(self, synchronises: bool) -> None:
        if self._steps < ALONE:
            self._forwards[not synchronises] += 1

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reads before a step: parameters that the script averages after a step are equal by then."""
        if self._steps == 0:
            self._first = id(optimizer)
        if self._steps < ALONE and id(optimizer) == self._first:
            if self._steps:
                self._heads.append(Reading(self._params, HEAD_BYTES))
            self._steps += 1

    def take_notes(self, is_last: bool = False) -> Notes:
        if len(self._heads) < ALONE - 1:
            return []
        heads, self._heads = self._heads, []
        return [(self._since, (*self._forwards, [head.prints() for head in heads]))]

    def release(self) -> None:
        self._params = ()

    def compare(self, number: int, notes: Sequence[Any]) -> Iterable[Finding]:
        """See [Note: averaging by oneself]."""
        synchronised, within, heads = zip(*notes, strict=True)
        values = [[tuple(head.items()) for head in of_rank] for of_rank in heads]
        parted = next((step for step, of_step in enumerate(zip(*values, strict=True)) if len({*of_step}) > 1), None)
        if parted is not None and not set.intersection(*({*of_rank[parted:]} for of_rank in values)):
            everyone, since = tuple(range(len(notes))), f" after step {number}" if number >= 0 else ""
            apart = [name for name in heads[0][-1] if len({of_rank[-1].get(name) for of_rank in heads}) > 1]
            text = (
                f"Gradients are not averaged: {ALONE} optimizer steps without a synchronised backward{since}, and "
                f"{ranks(everyone)} have different values of {names(apart)}, of which the first bytes are "
                f"compared. The wrapper ran "
                f"{count(max(within), 'time')} within `no_sync` and {count(max(synchronised), 'time')} outside of "
                f"it. {CALL_THE_WRAPPER}"
            )
            yield Finding("bypass", "wrapper", number, everyone, text)


class SameDataCheck(Check):
    """Has each rank its own data? Fingerprints the inputs of the first forward in each of the first steps."""

    def __init__(self) -> None:
        self._batches: list[list[Reading]] = []
        self._is_over = False

    def before_module(self, step: int, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if step < BATCHES and step == len(self._batches):
            found = list(tensors_in((inputs, kwargs)))
            is_data = sum(tensor.numel() for tensor in found) >= FEWEST_ELEMENTS
            self._batches.append([Reading([("", one)], BATCH_BYTES) for one in found] if is_data else [])

    def take_notes(self, is_last: bool = False) -> Notes:
        if self._is_over or len(self._batches) < BATCHES:
            return []
        self._is_over = True
        return [(BATCHES - 1, [tuple(head.prints().get("") for head in batch) for batch in self._batches])]

    def compare(self, number: int, notes: Sequence[Any]) -> Iterable[Finding]:
        if all(prints == notes[0] for prints in notes) and len(set(notes[0])) >= FEWEST_DIFFERENT:
            text = (
                f"All {len(notes)} ranks train on the same data: their first {BATCHES} batches were equal. Give "
                f"each rank its own part, for example with `torch.utils.data.DistributedSampler`, or another seed."
            )
            yield Finding("same data", "inputs", number, tuple(range(len(notes))), text, is_fatal=False)
