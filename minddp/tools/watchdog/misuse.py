"""Is the wrapper used as intended? Forward has to run through it, and each rank needs its own data.

[Note: averaging by oneself]
A script may train without synchronised backwards: it averages gradients itself, or parameters from time to time
(local SGD). So `ALONE` optimizer steps are no finding by themselves. The replicas must also have become different,
and must not have had a common value since, even after different numbers of steps: a rank may skip one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from minddp.core.autograd import tensors_in
from minddp.platform.wording import names, ranks
from minddp.tools.watchdog.check import ALONE, Check, Finding, Notes
from minddp.tools.watchdog.fingerprint import Reading, readable

BATCHES = 8
FEWEST_DIFFERENT = 4  # of these batches: a batch that never changes is a benchmark
FEWEST_ELEMENTS = 8  # of a batch: fewer may be an option, such as the number of the step
MOST_ELEMENTS = 4096  # of each tensor of a batch
CALL_THE_WRAPPER = (
    "Call the wrapper, not `ddp.module` or the bare module, compute the loss from what it returns, and leave "
    "`no_sync` for the last backward before each step."
)
NamedParams = Sequence[tuple[str, torch.nn.Parameter]]


class BypassCheck(Check):
    """Does forward run through the wrapper, outside of `no_sync`? `params` are on one device."""

    def __init__(self, params: NamedParams):
        self._params = params
        self.first_gradient(-1)

    def first_gradient(self, step: int) -> None:
        self._since = step
        self._stepping: int | None = None  # the id of the optimizer that was the first to step
        self._readings: list[Reading] = []

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reads before a step: parameters that the script averages after a step are equal by then."""
        if self._stepping is None:  # as in every step of a training without a problem
            self._stepping = id(optimizer)
        elif len(self._readings) < ALONE - 1 and id(optimizer) == self._stepping:
            self._readings.append(Reading(self._params))

    def take_notes(self, is_last: bool = False) -> Notes:
        readings = self._readings
        if len(readings) != ALONE - 1:
            return []
        notes = [(self._since, [reading.prints() for reading in readings])]
        readings.append(Reading())  # so that they are noted once
        return notes

    def release(self) -> None:
        self._params = ()

    def compare(self, number: int, notes: Sequence[Any]) -> Iterable[Finding]:
        """See [Note: averaging by oneself]."""
        values = [[tuple(prints.items()) for prints in of_rank] for of_rank in notes]
        parted = next((step for step, of_step in enumerate(zip(*values, strict=True)) if len({*of_step}) > 1), None)
        if parted is not None and not set.intersection(*({*of_rank[parted:]} for of_rank in values)):
            everyone, since = tuple(range(len(notes))), f" after step {number}" if number >= 0 else ""
            apart = [name for name in notes[0][-1] if len({of_rank[-1].get(name) for of_rank in notes}) > 1]
            text = (
                f"Gradients are not averaged: {ALONE} optimizer steps without a synchronised backward{since}, and "
                f"{ranks(everyone)} have different values of {names(apart)}. {CALL_THE_WRAPPER}"
            )
            yield Finding("bypass", "wrapper", number, everyone, text)


class SameDataCheck(Check):
    """Has each rank its own data? Compares the inputs of the first forward in each of the first steps."""

    def __init__(self) -> None:
        self._batches: list[list[torch.Tensor]] = []

    def before_module(self, step: int, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if step == len(self._batches) < BATCHES:
            found = [*readable(enumerate(tensors_in((inputs, kwargs)))).values()]
            is_data = sum(tensor.numel() for tensor in found) >= FEWEST_ELEMENTS
            first = [tensor.reshape(-1)[:MOST_ELEMENTS].to("cpu", copy=True) for tensor in found]
            self._batches.append(first if is_data else [])

    def take_notes(self, is_last: bool = False) -> Notes:
        if len(self._batches) != BATCHES:
            return []
        batches = [tuple(zlib.crc32(it.view(torch.uint8).numpy().data) for it in batch) for batch in self._batches]
        self._batches.append([])  # so that they are noted once
        return [(BATCHES - 1, batches)]

    def compare(self, number: int, notes: Sequence[Any]) -> Iterable[Finding]:
        if all(prints == notes[0] for prints in notes) and len(set(notes[0])) >= FEWEST_DIFFERENT:
            text = (
                f"All {len(notes)} ranks train on the same data: their first {BATCHES} batches were equal. Give "
                f"each rank its own part, for example with `torch.utils.data.DistributedSampler`, or another seed."
            )
            yield Finding("same data", "inputs", number, tuple(range(len(notes))), text)
