"""One recording, read: its steps, what a message costs, other plans. All pictures are made from this."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from minddp.xray.plans import Alternative, alternatives
from minddp.xray.predict import Fit, fit, transfers
from minddp.xray.reading import steps_of
from minddp.xray.recording import Recording
from minddp.xray.timeline import Step, typical

AS_GOOD = 0.0025  # of a step: less is no reason to prefer one plan


@dataclass(frozen=True)
class Analysis:
    """Computed when asked for, once.

    Raises:
        ValueError: `typical` and what builds on it, if no step was recorded.
    """

    recording: Recording

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return steps_of(self.recording)

    @cached_property
    def typical(self) -> Step:
        """The step that stands for all: by its median length."""
        return typical(self.steps)

    @cached_property
    def fit(self) -> Fit | None:
        """To all messages of the recording; None if none was seen to complete."""
        return fit(transfers([step for step in self.steps if step.complete]))

    @cached_property
    def plans(self) -> list[Alternative]:
        """The typical step under other plans, the recorded one first; empty where that makes no sense."""
        if self.fit is None or not self.typical.complete or not self.recording.has_plan:
            return []
        return alternatives(self.typical, self.fit.link)

    @cached_property
    def best_plan(self) -> Alternative | None:
        """Of the plans about as quick as the quickest, by prediction, the one with the fewest buckets.

        Where the latency of a message is not known, more buckets than there were may cost what nobody can predict.
        """
        trusted = [plan for plan in self.plans if self._can_predict(plan)]
        shortest_ns = min((plan.prediction.length_ns for plan in trusted), default=0)
        good = [plan for plan in trusted if plan.prediction.length_ns <= shortest_ns * (1 + AS_GOOD)]
        return min(good, key=lambda plan: len(plan.prediction.layout.buckets), default=None)

    def _can_predict(self, plan: Alternative) -> bool:
        separates_latency = self.fit is not None and self.fit.separates_latency
        return separates_latency or len(plan.prediction.layout.buckets) <= len(self.typical.layout.buckets)
