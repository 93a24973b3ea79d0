"""Is the wrapper used as intended? Forward has to run through it; each rank needs its own data, in a new order.

[Note: averaging by oneself]
A script may train without synchronised backwards: it averages gradients itself, or parameters from time to time
(local SGD). So `ALONE` optimizer steps are no finding by themselves. The replicas must also have become different,
and must not have had a common value since, even after different numbers of steps: a rank may skip one.
"""

from __future__ import annotations

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
SAMPLE_ELEMENTS = 1024  # of each tensor of a batch
MOST_SAMPLES = 512  # batches that the guard's thread has not read
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
        self._forwards = [0, 0]  # under `no_sync`, and others
        self._stepping: int | None = None  # the id of the optimizer that was the first to step
        self._readings: list[Reading] = []

    def post_forward(self, synchronises: bool) -> None:
        self._forwards[synchronises] += 1

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
        within, outside = self._forwards
        notes = [(self._since, (within > outside == 0, [reading.prints() for reading in readings]))]
        readings.append(Reading())  # so that they are noted once
        return notes

    def release(self) -> None:
        self._params = ()

    def compare(self, number: int, notes: Sequence[Any]) -> Iterable[Finding]:
        """See [Note: averaging by oneself]."""
        no_sync, readings = zip(*notes, strict=True)
        values = [[tuple(prints.items()) for prints in of_rank] for of_rank in readings]
        parted = next((step for step, of_step in enumerate(zip(*values, strict=True)) if len({*of_step}) > 1), None)
        if parted is not None and not set.intersection(*({*of_rank[parted:]} for of_rank in values)):
            everyone, since = tuple(range(len(notes))), f" after step {number}" if number >= 0 else ""
            apart = [name for name in readings[0][-1] if len({of_rank[-1].get(name) for of_rank in readings}) > 1]
            remedy = NO_SYNC if all(no_sync) else CALL_THE_WRAPPER
            text = (
                f"Gradients are not averaged: {ALONE} optimizer steps without a synchronised backward{since}, and "
                f"{ranks(everyone)} have different values of {names(apart)}. {remedy}"
            )
            yield Finding("bypass", "wrapper", number, everyone, text)


class SameDataCheck(Check):
    """Has each rank its own data, and each epoch another order?

    Takes a sample of the inputs of the first forward in each step. The first `BATCHES` are compared between ranks.
    If they come again, a second epoch has begun, in the order of the first.
    """

    def __init__(self) -> None:
        self._samples: deque[Reading] = deque(maxlen=MOST_SAMPLES)
        self._num_steps = 0
        self._first: list[int] = []
        self._num_read = self._num_again = 0  # batches, and those in a row that are the first ones again

    def before_module(self, step: int, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if step >= self._num_steps and self._num_again < BATCHES:
            self._num_steps = step + 1
            found = readable(enumerate(tensors_in((inputs, kwargs)))).values()
            is_data = sum(tensor.numel() for tensor in found) >= FEWEST_ELEMENTS
            self._samples.append(Reading(enumerate(map(spread_sample, found if is_data else ()))))

    def take_notes(self, is_last: bool = False) -> Notes:
        notes: Notes = []
        while self._samples and self._num_again < BATCHES:
            value = hash(tuple(self._samples.popleft().prints().values()))
            self._num_read += 1
            if len(self._first) < BATCHES:
                self._first.append(value)
                notes += [(BATCHES - 1, self._first)] if len(self._first) == BATCHES else []
                continue
            is_next = value == self._first[self._num_again]
            self._num_again = self._num_again + 1 if is_next else int(value == self._first[0])
            if self._num_again == BATCHES == len(set(self._first)):  # else they are synthetic
                notes.append((BATCHES, self._num_read - BATCHES))
        return notes

    def compare(self, number: int, notes: Sequence[Any]) -> Iterable[Finding]:
        everyone = tuple(range(len(notes)))
        if number == BATCHES:
            text = (
                f"Every epoch has the same order: the batches of steps {notes[0]} to {notes[0] + BATCHES - 1} are "
                f"the first {BATCHES} again, on all ranks. To shuffle anew, call `sampler.set_epoch(epoch)` before "
                f"each epoch."
            )
            yield Finding("same order", "inputs", notes[0], everyone, text)
        elif all(prints == notes[0] for prints in notes) and len(set(notes[0])) >= FEWEST_DIFFERENT:
            text = (
                f"All {len(notes)} ranks train on the same data: their first {BATCHES} batches were equal. Give "
                f"each rank its own part, for example with `torch.utils.data.DistributedSampler`, or another seed."
            )
            yield Finding("same data", "inputs", number, everyone, text)


def spread_sample(tensor: torch.Tensor) -> torch.Tensor:
    """Some elements, spread over the tensor's memory."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    step = span // SAMPLE_ELEMENTS + 1
    return tensor.detach().as_strided(
        (-(-span // step) if tensor.numel() else 0,), (step,), tensor.storage_offset()
    )
