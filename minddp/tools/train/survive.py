"""`--survive`: a run that continues when ranks are lost, and takes back those that are restarted.

    log, validate, save, vote, forward and backward     | the optimizer's step
    repeated with the remaining ranks if a rank is lost | once

The session of minddp.elastic repeats a step in which a rank is lost. So all collectives of the run come before the
session's vote on the step. A repeated attempt first restores the state of the run, and drops the records that the
lost attempt has written. Rank 0 may be lost, too: the next rank takes its place.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import time
from typing import Any

import torch.distributed as dist

from minddp.tools.train.checkpoint import State
from minddp.tools.train.loop import Run


class SurvivingRun:
    """Takes the steps of a `Run` within a session, which sends the state of this object to a new rank."""

    def __init__(self, run: Run):
        self.run, self.trainer = run, run.trainer
        self._generation = 0  # of the last attempt
        self._before_attempt: State | None = None  # None between two steps

    def to_the_end(self) -> str:
        """Take steps until there is a reason to end, and return it. Collective."""
        run, session, reason = self.run, self.run.world.session, None
        assert session is not None
        for step in session.steps(self.trainer.ddp, self.trainer.optimizer, last=sys.maxsize, also=[self]):
            with step:
                if self._before_attempt is not None:  # the last attempt was lost
                    self.load_state_dict(self._before_attempt)
                self._before_attempt = self.state_dict()
                reason = self._between_steps(session.generation.number)
                if reason is None:
                    run.take_step()
                else:
                    run.end(reason)
                    session.end()
                self._before_attempt = None
        return str(reason)

    def _between_steps(self, generation: int) -> str | None:
        """Returns the reason to end the run, or None. Collective."""
        run, step = self.run, self.run.progress.step
        group: Any = {"rank": dist.get_rank(), "size": dist.get_world_size(), "control": dist.group.WORLD}
        run.world = self.trainer.world = dataclasses.replace(run.world, **group)
        verdict = run.vote()()
        if generation != self._generation and step != run.first_step and run.world.is_main:
            run.log.forget_after(step - 1)
            run.append("event", what="generation", number=generation, ranks=run.world.size)
            run.say(f"From step {step} on with {run.world.size} ranks.")
        self._generation = generation
        reason = run.between_steps(verdict)
        run.files.wait()  # this rank may be lost in the next step
        return reason

    def state_dict(self) -> State:
        """The state of the run besides model and optimizer, as it was before the current attempt."""
        if self._before_attempt is not None:
            return self._before_attempt
        trainer, averages = self.trainer, self.trainer.averages
        current = {
            "run": (self.run.first_step, self.run.saved_at_s),
            "progress": dataclasses.asdict(trainer.progress),
            "position": trainer.batches.position,
            "averages": (averages.sums, averages.reduced),
            "gradient_norm": trainer.gradient_norm,
            "scaler": trainer.scaler.state_dict(),
        }
        return copy.deepcopy(current)

    def load_state_dict(self, state: State) -> None:
        state, trainer = copy.deepcopy(state), self.trainer
        self.run.first_step, self.run.saved_at_s = state["run"]
        vars(trainer.progress).update(state["progress"])  # `run` refers to the same object
        trainer.batches.position = state["position"]
        trainer.averages.sums, trainer.averages.reduced = state["averages"]
        trainer.gradient_norm = state["gradient_norm"]
        trainer.scaler.load_state_dict(state["scaler"])
        self.run.started_at = min(self.run.started_at, time.monotonic() - trainer.progress.elapsed_s)
        self._before_attempt = None
