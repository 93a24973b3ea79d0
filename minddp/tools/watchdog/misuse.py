"""Is the wrapper used as intended? Forward has to run through it; each rank needs its own data, in a new order.

[Note: averaging by oneself]
A script may train without synchronised backwards: it averages gradients itself, or parameters from time to time
(local SGD). So `ALONE` optimizer steps are no finding by themselves. The replicas must also have become different,
and must not have had a common value since, even after different numbers of steps: a rank may skip one.
"""

from __future__ import annotations

import zlib
from collections import deque
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
SAMPLE_ELEMENTS, MOST_SAMPLES = 256, 512  # of each tensor of a later batch; batches
CALL_THE_WRAPPER = (
    "Call the wrapper, not `ddp.module` or the bare module, compute the loss from what it returns, and leave "
    "`no_sync` for the last backward before each step."
)
NO_SYNC = "Every forward since was within `no_sync`: leave it for the last forward and backward before each step."
NamedParams = Sequence[tuple[str, torch.nn.Parameter]]


class BypassCheck(Check):
    """Does forward run through the wrapper, outside of `no_sync`? `params` are on one device."""

    def __init__(self, params: NamedParams):
        self._params = params
        self.first_gradient(-1)

    def first_gradient(self, step: int) -> None:
        self._since = step
        self._kept = 0  # forwards under `no_sync`
        self._forwards = 0
        self._stepping: int | None = None  # the id of the optimizer that was the first to step
        self._readings: list[Reading] = []

    def post_forward(self, synchronises: bool) -> None:
        self._forwards += 1
        self._kept += not synchronises

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
        is_kept = 0 < self._forwards == self._kept
        notes = [(self._since, (is_kept, [reading.prints() for reading in readings]))]
        readings.append(Reading())  # so that they are noted once
        return notes

    def release(self) -> None:
        self._params = ()

    def compare(self, number: int, notes: Sequence[Any]) -> Iterable[Finding]:
        """See [Note: averaging by oneself]."""
        readings = [of_rank for _, of_rank in notes]
        values = [[tuple(prints.items()) for prints in of_rank] for of_rank in readings]
        parted = next((step for step, of_step in enumerate(zip(*values, strict=True)) if len({*of_step}) > 1), None)
        if parted is not None and not set.intersection(*({*of_rank[parted:]} for of_rank in values)):
            everyone, since = tuple(range(len(notes))), f" after step {number}" if number >= 0 else ""
            apart = [name for name in readings[0][-1] if len({of_rank[-1].get(name) for of_rank in readings}) > 1]
            is_kept = all(kept for kept, _ in notes)
            text = (
                f"Gradients are not averaged: {ALONE} optimizer steps without a synchronised backward{since}, and "
                f"{ranks(everyone)} have different values of {names(apart)}. {NO_SYNC if is_kept else CALL_THE_WRAPPER}"
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


class SameOrderCheck(Check):
    """Does the order of the batches change? Finds the first batches once more, as in a second epoch."""

    def __init__(self) -> None:
        self._next = 0  # step
        self._samples: deque[list[torch.Tensor]] = deque(maxlen=MOST_SAMPLES)
        self._first: list[int] = []
        self._num_found = self._num_read = 0  # of the first batches, again; of all
        self._is_over = False

    def before_module(self, step: int, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if step < self._next or self._is_over:
            return
        self._next = step + 1
        found = [*readable(enumerate(tensors_in((inputs, kwargs)))).values()]
        self._samples.append([spread_sample(tensor) for tensor in found])

    def take_notes(self, is_last: bool = False) -> Notes:
        """Each rank searches its own batches, in the guard's thread."""
        while self._samples and not self._is_over:
            sample = [tensor.to("cpu") for tensor in self._samples.popleft()]
            value = hash(tuple(zlib.crc32(it.view(torch.uint8).numpy().data) for it in sample))
            self._num_read += 1
            if len(self._first) < BATCHES:
                self._first.append(value)
                self._is_over = len(set(self._first)) < len(self._first)  # synthetic, or too few to tell
            elif value == self._first[self._num_found]:
                self._num_found += 1
            else:
                self._num_found = int(value == self._first[0])
            if self._num_found == BATCHES:
                self._is_over = True
                return [(0, self._num_read - BATCHES)]
        return []

    def compare(self, number: int, notes: Sequence[Any]) -> Iterable[Finding]:
        text = (
            f"The batches of step {notes[0]} and the {BATCHES - 1} after it are the first {BATCHES} once more, in the "
            f"same order, on all ranks: every epoch has one order. If they are to be shuffled, call "
            f"`sampler.set_epoch(epoch)` before each epoch."
        )
        yield Finding("same order", "inputs", notes[0], tuple(range(len(notes))), text)


def spread_sample(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of some elements, spread over the tensor's memory. Does not wait for the device."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    step = span // SAMPLE_ELEMENTS + 1
    return tensor.as_strided((span // step if tensor.numel() else 0,), (step,), tensor.storage_offset()).clone()
