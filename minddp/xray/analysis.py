"""One recording, analysed: its steps, what a message costs, predictions. All pictures are made from this."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from minddp.xray.reading import steps_of
from minddp.xray.recording import Recording
from minddp.xray.timeline import Step, typical
from minddp.xray.what_if import Alternative, Fit, alternatives, fit, with_other_ranks


@dataclass(frozen=True)
class Analysis:
    """Each property is computed once, when it is first read.

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
        return fit([step for step in self.steps if step.complete])

    @cached_property
    def plans(self) -> list[Alternative]:
        """The typical step under other plans, the recorded one first; empty where that makes no sense."""
        if self.fit is None or not self.typical.complete or not self.recording.has_plan:
            return []
        return alternatives(self.typical, self.fit.link)

    @cached_property
    def with_other_ranks(self) -> dict[int, Step]:
        """The typical step with more ranks; empty where the latency of a message is not known."""
        if not self.plans or self.fit is None or not self.fit.separates_latency:
            return {}
        return with_other_ranks(self.typical, self.fit.link)
