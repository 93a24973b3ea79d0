"""One recording, analysed: its steps, what things cost, what would change them. All pictures are made from this."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property

from minddp.tools.xray.reading import steps_of
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.replay import Costs, costs_of
from minddp.tools.xray.timeline import Activity, Step, spread_ns
from minddp.tools.xray.what_if import LEAST_SHARE, WhatIf, what_ifs

MOST_PLAYED = 40  # steps, around the typical one


class NoStep(ValueError):
    """Nothing that was recorded is a step."""


@dataclass(frozen=True)
class Analysis:
    """Each property is computed once, when it is first read.

    Raises:
        NoStep: `comparable` and what builds on it, if no step was recorded.
    """

    recording: Recording

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return steps_of(self.recording)

    @cached_property
    def comparable(self) -> list[Step]:
        """The complete steps with the final plan; if none is complete, all with it."""
        if not self.steps:
            raise NoStep(
                "No step was recorded: there must be a forward and a backward that is synchronised within the "
                "recording. Put `with minddp.xray(ddp)` around at least one whole step."
            )
        candidates = [step for step in self.steps if step.complete] or list(self.steps)
        return [step for step in candidates if step.plan.buckets == candidates[-1].plan.buckets]

    @cached_property
    def typical(self) -> Step:
        """The step that stands for all: the one of median length among the `comparable` ones."""
        median = statistics.median_low(step.length_ns for step in self.comparable)
        return next(step for step in self.comparable if step.length_ns == median)

    @cached_property
    def noise_ns(self) -> int:
        """How far steps differ."""
        return spread_ns(self.comparable)

    @cached_property
    def costs(self) -> Costs | None:
        """Of all messages of the recording; None if none was seen to complete."""
        return costs_of([step for step in self.steps if step.complete])

    @cached_property
    def played(self) -> list[Step]:
        """The steps that are played again: those around the typical one that have its ranks."""
        same = [step for step in self.comparable if len(step.ranks) == len(self.typical.ranks)]
        first = max(0, same.index(self.typical) - MOST_PLAYED // 2)
        return same[first : first + MOST_PLAYED]

    @cached_property
    def what_ifs(self) -> list[WhatIf]:
        """The typical step unchanged, then with one thing changed. Empty if it cannot be played: with `passes`."""
        if self.costs is None or not self.typical.complete or self.typical.ranks[0].passes:
            return []
        return what_ifs(self.recording, self.played, self.played.index(self.typical), self.costs)

    @cached_property
    def advice(self) -> list[WhatIf]:
        """What is worth saying: gains that are not negligible, the largest first, and of all plans the best.

        If the typical step loses more to a late rank than to communication, the change of that rank comes first:
        its lateness was measured, the gain of a quicker wire is fitted to messages that contend for cores.
        """
        unchanged, changes = self.what_ifs[:1], self.what_ifs[1:]
        plans = [change for change in changes if change.of_plan]
        least_ns = LEAST_SHARE * unchanged[0].step_ns if unchanged else 0.0
        said = [one for one in changes if one.gain_ns >= least_ns and (not one.of_plan or one is plans[0])]
        step = self.typical
        is_most = step.waits_for_last_ns(step.waits_longest) > step.last.parts_ns[Activity.EXPOSED]
        first = next((one for one in said if is_most and step.late_rank in one.ranks), None)
        return sorted(said, key=lambda one: one is not first)
