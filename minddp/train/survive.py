"""`--survive`: a run that goes on when ranks are lost, and takes back those that are started again.

    what is due since the last step, the shares, the vote | the optimizer
    again, with those that are left, if a rank is lost    | once

A run has collectives of its own: ballots, averages, validation, the agreement that all is written. Here they all
come before the vote of a step of minddp.elastic, whose session repeats them after a loss. One more step follows the
last one of the optimizer: it ends the run in place of computing shares.

What a lost attempt has changed in the run is put back, what it has written to metrics.jsonl is dropped, and a
checkpoint is written again. So rank 0 may be lost, too: the next one in order takes its place.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import time
from functools import reduce
from operator import attrgetter
from typing import Any

import torch.distributed as dist

from minddp.train.checkpoint import State
from minddp.train.loop import Run
from minddp.train.stop import CANNOT_WRITE, Vote, reason_to_end

# What a run has beside the model and the optimizer.
STATE = (
    *("first_step", "saved_at_s", "training_s", "trainer.step", "trainer.elapsed_s", "trainer.best_loss"),
    *("trainer.gradient_norm", "trainer.batches.position", "trainer.averages.sums", "trainer.averages.known"),
)


class SurvivingRun(Run):
    def begin(self, checkpoint: State | None) -> None:
        """Nothing yet: it belongs to the first step."""
        self.first_step, self._checkpoint = self.trainer.step, checkpoint
        self._started_at = time.monotonic() - self.trainer.elapsed_s
        self._generation = 0  # in which this process has computed before
        self._before: State | None = None  # the state before a step that has not counted

    def to_the_end(self) -> str:
        trainer, session, reason = self.trainer, self.world.session, None
        assert session is not None
        for step in session.steps(trainer.ddp, trainer.optimizer, last=sys.maxsize, also=[self]):
            with step:
                began = time.monotonic()
                self.load_state_dict(self.state_dict())
                self._before = self.state_dict()
                reason = self._between(session.generation.number)
                if reason is None:
                    trainer.optimizer_step()
                else:
                    self._end(reason)
                    session.end()
                self._before = None
                self.training_s += time.monotonic() - began
        return str(reason)

    def _between(self, generation: int) -> str | None:
        """What is due before the next step; returns why there is none, or None. Collective."""
        trainer = self.trainer
        group: Any = {"rank": dist.get_rank(), "size": dist.get_world_size(), "control": dist.group.WORLD}
        self.world = trainer.world = dataclasses.replace(self.world, **group)
        wanted = self.signals.wanted if self.failure is None else CANNOT_WRITE
        verdict = Vote(self.world, wanted, time.monotonic() - self._started_at).result()
        trainer.elapsed_s = verdict.elapsed_s
        reason = reason_to_end(self.settings, trainer.step, verdict)
        if trainer.step == self.first_step:
            super().begin(self._checkpoint)
        else:
            if generation != self._generation and self.world.is_main:
                self.log.forget_after(trainer.step - 1)
                self._event("generation", number=generation, ranks=self.world.size)
                self._say(f"From step {trainer.step} on with {self.world.size} ranks.")
            self._between_steps(reason)
        self._generation = generation
        self.saver.wait()  # this rank may be lost in the next step
        return reason

    def state_dict(self) -> State:
        if self._before is not None:
            return self._before
        values = {path: attrgetter(path)(self) for path in STATE}
        return copy.deepcopy(values | {"scaler": self.trainer.precision.scaler.state_dict()})

    def load_state_dict(self, state: State) -> None:
        state = copy.deepcopy(state)
        self.trainer.precision.scaler.load_state_dict(state.pop("scaler"))
        for path, value in state.items():
            *owners, name = path.split(".")
            setattr(reduce(getattr, owners, self), name, value)
        self._started_at = min(self._started_at, time.monotonic() - self.trainer.elapsed_s)
