"""The analysis of one recording: its steps, the costs of messages, and the advice. All pictures use it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property

from minddp.tools.xray.model import Costs, costs_of, predicted_ns
from minddp.tools.xray.reading import steps_of
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.timeline import RecordedStep
from minddp.tools.xray.what_if import LEAST_SHARE, WhatIf, what_ifs


class NoStep(ValueError):
    """The recording holds no step."""


@dataclass(frozen=True)
class Analysis:
    """Each property is computed once, when it is first read.

    Raises:
        NoStep: any property, if no whole step was recorded.
    """

    recording: Recording

    @cached_property
    def steps(self) -> tuple[RecordedStep, ...]:
        if steps := steps_of(self.recording):
            return steps
        raise NoStep(
            "No whole step was recorded: there must be a forward and a synchronised backward within the recording. "
            "Put `with minddp.xray(ddp)` around at least one whole step."
        )

    @cached_property
    def typical(self) -> RecordedStep:
        """The step of median length. It stands for all."""
        median = statistics.median_low(step.length_ns for step in self.steps)
        return next(step for step in self.steps if step.length_ns == median)

    @cached_property
    def noise_ns(self) -> int:
        """The middle half of the steps' lengths lies within this; 0 for one step."""
        lengths_ns = [step.length_ns for step in self.steps]
        low, _, high = statistics.quantiles(lengths_ns * 2, method="inclusive")
        return round(high - low)

    @cached_property
    def alike(self) -> list[RecordedStep]:
        """The steps that have the ranks of the typical one."""
        return [step for step in self.steps if len(step.ranks) == len(self.typical.ranks)]

    @cached_property
    def costs(self) -> Costs | None:
        """The costs of messages; None if none was seen to complete, so that nothing can be predicted."""
        return costs_of(self.steps, self.typical)

    @cached_property
    def predicted_ns(self) -> float | None:
        """The length that the model predicts for the typical step as it is; None without `costs`."""
        return None if self.costs is None else predicted_ns(self.typical, self.costs)

    @cached_property
    def what_ifs(self) -> list[WhatIf]:
        """All changes that were tried, the best first; none without `costs`."""
        return [] if self.costs is None else what_ifs(self.recording, self.alike, self.typical, self.costs)

    @cached_property
    def advice(self) -> list[WhatIf]:
        """The gains that are not negligible, the largest first, with the best of all plans."""
        best = next((change for change in self.what_ifs if change.plan is not None), None)
        least_ns = LEAST_SHARE * self.typical.length_ns
        return [one for one in self.what_ifs if one.gain_ns >= least_ns and (one.plan is None or one is best)]
