"""The analysis of one recording: its steps, the costs of messages, and the advice. All pictures use it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property

from minddp.tools.xray.reading import steps_of
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.replay import Costs, costs_of
from minddp.tools.xray.timeline import Activity, RecordedStep, spread_ns
from minddp.tools.xray.what_if import LEAST_SHARE, WhatIf, what_ifs

MOST_SIMULATED = 40  # steps, around the typical one


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
        """The range of the middle half of the steps' lengths."""
        return spread_ns([step.length_ns for step in self.steps])

    @cached_property
    def simulated(self) -> list[RecordedStep]:
        """The steps to simulate: those around the typical one that have its ranks."""
        same = [step for step in self.steps if len(step.ranks) == len(self.typical.ranks)]
        first = max(0, same.index(self.typical) - MOST_SIMULATED // 2)
        return same[first : first + MOST_SIMULATED]

    @cached_property
    def costs(self) -> Costs | None:
        """The costs of messages; None if there was none, so that steps cannot be simulated."""
        return costs_of(self.steps)

    @cached_property
    def what_ifs(self) -> list[WhatIf]:
        """The steps unchanged, then with one thing changed. Empty if they cannot be simulated."""
        return [] if self.costs is None else what_ifs(self.recording, self.simulated, self.typical, self.costs)

    @cached_property
    def advice(self) -> list[WhatIf]:
        """The gains that are not negligible, the largest first, with the best of all plans.

        If the typical step loses more to a late rank than to communication, the change of that rank comes first:
        its lateness was measured, whereas the gain of a quicker link is fitted to messages that contend for cores.
        """
        unchanged, changes = self.what_ifs[:1], self.what_ifs[1:]
        plans = [change for change in changes if change.plan is not None]
        least_ns = LEAST_SHARE * unchanged[0].step_ns if unchanged else 0.0
        said = [one for one in changes if one.gain_ns >= least_ns and (one.plan is None or one is plans[0])]
        step = self.typical
        is_most = step.waits_for_last_ns(step.waits_longest) > step.last.parts_ns[Activity.EXPOSED]
        first = next((one for one in said if is_most and step.late_rank in one.ranks), None)
        return sorted(said, key=lambda one: one is not first)
