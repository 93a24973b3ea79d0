"""The work between steps: agree on whether to continue, log, validate, save."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch.distributed as dist

from minddp.train.checkpoint import checkpoint_path
from minddp.train.display import Display
from minddp.train.metrics import MetricsLog
from minddp.train.schedule import peak_learning_rate
from minddp.train.settings import Settings
from minddp.train.stop import StopSignals, Vote, reason_to_end
from minddp.train.trainer import Trainer
from minddp.train.world import World

if TYPE_CHECKING:
    from minddp.xray.xray import Window


def train(settings: Settings, world: World) -> str:
    """Train until the limit is reached or a signal comes; leave a checkpoint either way. Collective.

    Returns "finished", or the name of the signal.
    """
    trainer = Trainer(settings, world)
    if settings.resume:
        trainer.restore(checkpoint_path(settings))
    with Display(world.is_main, settings.task) as display, StopSignals() as signals, x_ray(trainer) as window:
        return Run(trainer, display, signals, window).to_the_end()


def x_ray(trainer: Trainer) -> AbstractContextManager[Window | None]:
    """The recorder of the steps that --xray names; it writes its files after the last of them."""
    settings = trainer.settings
    if not settings.recorded_steps:
        return nullcontext()
    from minddp.xray.xray import Window

    files = [settings.folder / "xray.html", settings.folder / "xray.json"]
    return Window(trainer.ddp, settings.recorded_steps, title=f"minddp train --task {settings.task}", save_to=files)


class Run:
    """A trainer between its steps: when to log, validate, save, and end."""

    def __init__(self, trainer: Trainer, display: Display, signals: StopSignals, window: Window | None):
        self.trainer, self.display, self.signals, self.window = trainer, display, signals, window
        self.settings, self.world = trainer.settings, trainer.world
        self.started_at = time.monotonic() - trainer.elapsed_s
        self.training_s = 0.0  # since the last training record, without validations and checkpoints
        self.log = MetricsLog(self.settings.folder / "metrics.jsonl")
        if self.world.is_main:
            self.settings.folder.mkdir(parents=True, exist_ok=True)
            if not self.settings.resume:
                checkpoint_path(self.settings).unlink(missing_ok=True)
            self.log.forget_after(trainer.step if self.settings.resume else -1)

    def to_the_end(self) -> str:
        """Take steps until there is a reason to end. Collective."""
        trainer, reason = self.trainer, None
        self.display.say(self._facts())
        if trainer.step == 0:
            self._log_validation()  # before training: the loss must be that of a guess
        batches = iter(trainer.batches)
        while reason is None:
            if self.window is not None:
                self.window.before_step(trainer.step)
            step_began = time.monotonic()
            vote = Vote(self.world, self.signals, step_began - self.started_at)  # See [Note: the vote].
            trainer.optimizer_step(batches)
            verdict = vote.result()
            self.training_s += time.monotonic() - step_began
            trainer.elapsed_s = verdict.elapsed_s
            reason = reason_to_end(self.settings, trainer.step, verdict)
            self._between_steps(reason)
        self.display.say(self._farewell(reason))
        return reason

    def _between_steps(self, reason: str | None) -> None:
        """What is due after this step; after a signal, no time is spent on a validation. Collective.

        Before a checkpoint comes a training record, which fails if the loss is not a number: such a state is
        not worth keeping.
        """
        settings, step = self.settings, self.trainer.step
        saves = reason is not None or step % settings.checkpoint_every == 0
        validates = reason == "finished" or (reason is None and step % settings.validate_every == 0)
        if saves or step % settings.log_every == 0:
            self._log_training()
        if saves:
            self.trainer.save(checkpoint_path(settings))
        self.display.advance(self.trainer.progress)
        if validates:
            self._log_validation()

    def _log_training(self) -> None:
        """Record the averages since the last record. Collective.

        Raises FloatingPointError, on every rank at once, when the loss is no longer a number.
        """
        trainer = self.trainer
        means = trainer.averages.over_ranks()
        if not math.isfinite(means.loss):
            raise FloatingPointError(
                f"The training loss is {means.loss} at step {trainer.step}. "
                f"Lower --learning-rate or raise --warmup-steps; the last checkpoint is of an earlier step."
            )
        record = {
            "kind": "training",
            "step": trainer.step,
            "epoch": trainer.batches.position.epoch,
            "elapsed_s": round(trainer.elapsed_s, 3),
            "loss": means.loss,
            "accuracy": means.accuracy,
            "learning_rate": trainer.optimizer.param_groups[0]["lr"],
            "gradient_norm": float(trainer.gradient_norm),
            "targets_per_s": means.targets / self.training_s,
        }
        self.training_s = 0.0
        if self.world.is_main:
            self.log.append(**record)
        self.display.training(record, trainer.task.targets_are)

    def _log_validation(self) -> None:
        """Validate and record it. Collective."""
        trainer = self.trainer
        means = trainer.validate()
        if self.world.is_main:
            self.log.append(
                kind="validation",
                step=trainer.step,
                elapsed_s=round(trainer.elapsed_s, 3),
                loss=means.loss,
                accuracy=means.accuracy,
                targets=means.targets,
            )
        self.display.validation(trainer.step, means, trainer.task.targets_are)

    def _facts(self) -> str:
        settings, world = self.settings, self.world
        parameters = sum(param.numel() for param in self.trainer.model.parameters())
        samples = settings.batch_size * settings.accumulate * world.size
        return (
            f"{settings.task}: {parameters:,} parameters, {world.size} x {world.device.type} "
            f"({dist.get_backend()}), ddp {settings.ddp}, {samples} samples a step, peak learning rate "
            f"{peak_learning_rate(settings, world.size):.2g}, step {self.trainer.step}, {settings.folder}"
        )

    def _farewell(self, reason: str) -> str:
        path, step = checkpoint_path(self.settings), self.trainer.step
        if reason == "finished":
            return f"Finished after {step} steps in {self.trainer.elapsed_s:.0f} s; checkpoint in {path}."
        return f"Stopped by {reason} after step {step}; checkpoint in {path}. Continue with --resume."
