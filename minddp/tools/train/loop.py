"""A run on one rank: what happens before, between and after the optimizer steps."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from minddp.platform import streams
from minddp.tools.train.checkpoint import CheckpointFiles, State, share_newest, write_atomically
from minddp.tools.train.checks import checked
from minddp.tools.train.metrics import MetricsLog, open_tracker, training_line, validation_line, waiting
from minddp.tools.train.optimizer import peak_learning_rate
from minddp.tools.train.settings import RunError, Settings, step_range
from minddp.tools.train.stop import CANNOT_WRITE, StopSignals, Verdict, vote
from minddp.tools.train.trainer import Trainer
from minddp.tools.train.world import World


def train(settings: Settings, world: World) -> str:
    """Train until a limit is reached or a signal comes, and write a checkpoint. Collective.

    Returns "finished", or the name of the signal.

    Raises:
        AgreedError: the settings cannot work on some rank, or rank 0 cannot write its files.
    """
    files = CheckpointFiles(settings.folder, settings.keep)
    task, found = world.agreed(lambda: checked(settings, files if world.local_rank == 0 else None))
    checkpoint = share_newest(found, world)
    trainer = world.agreed(lambda: Trainer(settings, world, task))
    if checkpoint is not None:
        trainer.restore(checkpoint)
    with StopSignals() as signals, recorded(trainer) as before_step:
        run = Run(trainer, signals, files, checkpoint)
        if settings.survive:
            from minddp.tools.train.survive import SurvivingRun

            return SurvivingRun(run).to_the_end()
        return run.to_the_end(before_step)


@contextmanager
def recorded(trainer: Trainer) -> Iterator[Callable[[], object]]:
    """Record the steps that --xray names. Yields a function to call before each step."""
    folder, steps = trainer.settings.folder, step_range(trainer.settings.xray)
    if not steps:
        yield lambda: None
        return
    from minddp.tools.xray.wrappers import Wrappers

    title, files = f"minddp train --task {trainer.settings.task}", [folder / "xray.html", folder / "xray.json"]
    wrappers, error = Wrappers(steps, title, files, then=lambda xray: None), None
    wrappers.add(trainer.ddp)
    try:
        yield lambda: wrappers.before_step(trainer.progress.step)
    except BaseException as raised:
        error = raised
        raise
    finally:
        wrappers.close(error)


class Run:
    """Decides between two steps when to log, validate, save and end."""

    def __init__(self, trainer: Trainer, signals: StopSignals, files: CheckpointFiles, checkpoint: State | None):
        self.trainer, self.signals, self.world = trainer, signals, trainer.world
        self.settings, self.progress = trainer.settings, trainer.progress
        self.checkpoint = checkpoint  # from which the run continues
        self.first_step = self.progress.step
        self.saved_at_s = self.progress.elapsed_s
        self.training_s = 0.0  # time in steps since the last training record
        self.files = files
        self.log = MetricsLog(self.settings.folder / "metrics.jsonl")
        self._log_failure: RunError | None = None  # on rank 0: metrics.jsonl cannot be written
        self.started_at = time.monotonic() - self.progress.elapsed_s

    def to_the_end(self, before_step: Callable[[], object]) -> str:
        """Take steps until there is a reason to end, and return it. Collective."""
        verdict = self.vote()
        while (reason := self.between_steps(verdict())) is None:
            before_step()
            verdict = self.vote()
            self.take_step()
        self.end(reason)
        return reason

    def vote(self) -> Callable[[], Verdict]:
        number = self.signals.pending if self.failure is None else CANNOT_WRITE
        return vote(self.world, number, time.monotonic() - self.started_at)

    def take_step(self) -> None:
        began = time.monotonic()
        self.trainer.optimizer_step()
        self.training_s += time.monotonic() - began

    @property
    def failure(self) -> RunError | None:
        return self._log_failure or self.files.failure

    def between_steps(self, verdict: Verdict) -> str | None:
        """Log, validate and save if it is time; returns the reason to end the run, if any. Collective.

        After a signal there is no validation, to save time. Before a checkpoint come a training record, which fails
        if the loss is not finite, and a validation, which decides whether the checkpoint is the best.
        """
        settings, step = self.settings, self.progress.step
        self.progress.elapsed_s = verdict.elapsed_s
        reason = verdict.reason_to_end(settings, step)
        if step == self.first_step:
            self._begin()
            return reason
        minutes = math.inf if settings.checkpoint_minutes is None else settings.checkpoint_minutes
        is_due = self.progress.elapsed_s - self.saved_at_s >= 60 * minutes
        saves = reason is not None or is_due or step % settings.checkpoint_every == 0
        validates = reason == "finished" or (reason is None and step % settings.validate_every == 0)
        if saves or step % settings.log_every == 0:
            self._log_training()
        is_best = validates and self._validate()
        if saves or is_best:
            self._save(is_best=is_best)
        return reason

    def _begin(self) -> None:
        """Prepare the folder, and print what the run is. Collective."""
        trainer, settings, world = self.trainer, self.settings, self.world
        self.log.tracker = open_tracker(settings) if world.is_main else None
        world.agreed(lambda: self._take_folder() if world.is_main else None)
        self.append("event", what="start", ranks=world.size, restarts=world.restarts)
        parameters = sum(param.numel() for param in trainer.model.parameters())
        samples = settings.batch_size * settings.accumulate * trainer.num_logical_ranks
        rate = peak_learning_rate(settings, trainer.num_logical_ranks)
        restart = f" (restart {world.restarts})" if world.restarts else ""
        self.say(
            f"{settings.task}: {parameters:,} parameters, {world.size} x {world.device.type} "
            f"({dist.get_backend()}), ddp {settings.ddp}, {settings.precision}, {samples} samples a step, peak "
            f"learning rate {rate:.2g}, step {self.first_step}{restart}, {settings.folder}"
        )
        num_ranks = len(self.checkpoint["random_states"]) if self.checkpoint else 0
        if num_ranks not in (0, world.size):
            self.say(
                f"The checkpoint is from {num_ranks} ranks; the run continues after its samples, with other bits"
            )
        if self.first_step == 0:
            self._validate()  # an untrained model should have the loss of a guess

    def _take_folder(self) -> None:
        is_new = self.checkpoint is None
        self.settings.folder.mkdir(parents=True, exist_ok=True)
        if is_new:
            self.files.discard()
        self.log.forget_after(-1 if is_new else self.first_step)
        text = json.dumps(dataclasses.asdict(self.settings), default=str, indent=1)
        write_atomically(self.settings.folder / "settings.json", lambda file: file.write(text.encode()))

    def _save(self, *, is_best: bool) -> None:
        """Collective."""
        state = self.trainer.state()
        if state is not None:
            self.files.save(state, is_best=is_best)
        self.saved_at_s = self.progress.elapsed_s
        self.append("event", what="checkpoint")

    def _log_training(self) -> None:
        """Record the averages since the last record. Collective. Raises FloatingPointError for an infinite loss."""
        trainer, steps_s = self.trainer, max(self.training_s, 1e-9)
        means = trainer.averages.over_ranks()
        if not math.isfinite(means.loss):
            raise FloatingPointError(
                f"The training loss is {means.loss} at step {self.progress.step}; the last checkpoint is older. "
                f"Lower --learning-rate or raise --warmup-steps."
            )
        record = {
            "step": self.progress.step,
            "epoch": trainer.batches.position.epoch,
            "loss": means.loss,
            "accuracy": means.accuracy,
            "learning_rate": trainer.optimizer.param_groups[0]["lr"],
            "gradient_norm": float(trainer.gradient_norm),
            "targets_per_s": means.targets / steps_s,
            "tflops_per_s": trainer.flops_per_target * means.targets / steps_s / 1e12,
            "data_share": trainer.batches.waited_s / steps_s,
            "memory_mib": round(streams.peak_memory_bytes(self.world.device) / 2**20),
            **waiting(trainer.ddp),
        }
        if trainer.scaler.is_enabled():
            record["loss_scale"] = trainer.scaler.get_scale()
        self.training_s = trainer.batches.waited_s = 0.0
        self.append("training", **record)
        done = self.settings.progress(self.progress.step, self.progress.elapsed_s)
        self.say(training_line(record, done, trainer.task.targets_are))

    def _validate(self) -> bool:
        """Validate and record the result; returns True if it is the best so far. Collective."""
        means = self.trainer.validate()
        self.append("validation", **dataclasses.asdict(means))
        self.say(validation_line(self.progress.step, means, self.trainer.task.targets_are))
        is_best = means.loss < self.progress.best_loss
        self.progress.best_loss = min(means.loss, self.progress.best_loss)
        return is_best and self.progress.step > 0

    def end(self, reason: str) -> None:
        """Return once everything is written: a launcher may kill all ranks when the first one ends. Collective."""
        self.append("event", what="stop", reason=reason)
        self.world.agreed(self._flush)
        step, seconds = self.progress.step, self.progress.elapsed_s
        stopped = f"Stopped by {reason} after step {step}. Continue with --resume yes."
        finished = f"Finished after {step} steps in {seconds:.0f} s; checkpoints in {self.files.folder}."
        self.say(finished if reason == "finished" else stopped)

    def _flush(self) -> None:
        """Raises RunError on rank 0 if something could not be written."""
        if self.log.tracker is not None:
            self.log.tracker.close()
        self.files.wait()
        if self.failure is not None:
            raise self.failure

    def append(self, kind: str, **record: Any) -> None:
        """Append to metrics.jsonl on rank 0."""
        now = {"step": self.progress.step, "elapsed_s": round(self.progress.elapsed_s, 3)}
        if self.world.is_main and self.failure is None:
            try:
                self.log.append(kind=kind, **now | record)
            except OSError as error:
                self._log_failure = RunError(f"Cannot write {self.log.path}: {error.strerror}.")

    def say(self, text: str) -> None:
        """Print on rank 0. If the reader has ended, as in `| head`, the run saves and ends."""
        if self.world.is_main:
            try:
                print(text, flush=True)
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at its exit
                self.signals.received = signal.SIGPIPE
