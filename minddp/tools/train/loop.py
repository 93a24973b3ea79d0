"""A run on one rank: what happens before, between and after the optimizer steps."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from minddp.tools.job.launcher import STOP_SIGNALS
from minddp.tools.train.checkpoint import CheckpointFiles, find_checkpoint
from minddp.tools.train.metrics import MetricsLog
from minddp.tools.train.settings import RunError, Settings
from minddp.tools.train.task import load_task
from minddp.tools.train.trainer import Trainer
from minddp.tools.train.world import World


def train(settings: Settings, world: World) -> str:
    """Train until a limit is reached or a signal comes, and write a checkpoint. Collective.

    Returns "finished", or the name of the signal.

    Raises:
        RunError: the settings cannot work, the loss is not finite, or rank 0 cannot write a checkpoint.
    """
    files = CheckpointFiles(settings.folder, settings.keep)
    files.check_resume(settings)
    checkpoint = find_checkpoint(files, world)
    trainer = Trainer(settings, world, load_task(settings))
    if checkpoint is not None:
        trainer.restore(checkpoint)
    log = open_log(trainer)
    if trainer.step == 0:  # an untrained model should have the loss of a guess
        log.append("validation", 0, **trainer.validate()._asdict())

    signal_name = None
    with stop_signals() as pending:
        while trainer.step < settings.steps and signal_name is None:
            trainer.optimizer_step()
            signal_name, step = vote(world, pending()), trainer.step
            is_finished = step >= settings.steps
            saves = is_finished or signal_name is not None or step % settings.checkpoint_every == 0
            if saves or step % settings.log_every == 0:
                report_training(trainer, log)  # raises an error if the loss is not finite, so it is not saved
            if is_finished or (signal_name is None and step % settings.validate_every == 0):
                log.append("validation", step, **trainer.validate()._asdict())
            if saves:
                state = trainer.state()
                if world.rank == 0:
                    files.write(state)
                dist.barrier(group=world.control)  # no rank ends before the checkpoint is on the disk
    log.append("end", trainer.step, reason=signal_name or "finished")
    return signal_name or "finished"


def open_log(trainer: Trainer) -> MetricsLog:
    """The log of the run, without records of an older run or that will be written again."""
    settings, world = trainer.settings, trainer.world
    log = MetricsLog(settings.folder / "metrics.jsonl", writes=world.rank == 0)
    if world.rank == 0:
        settings.folder.mkdir(parents=True, exist_ok=True)
        log.forget_after(trainer.step or -1)
    log.append(
        "start",
        trainer.step,
        device=world.device.type,
        ranks=world.size,
        restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        parameters=sum(param.numel() for param in trainer.model.parameters()),
        settings=dataclasses.asdict(settings),
    )
    return log


def report_training(trainer: Trainer, log: MetricsLog) -> None:
    """Report the averages since the last report. Collective. Raises RunError if the loss is not finite."""
    means = trainer.averages.over_ranks()
    if not math.isfinite(means.loss):
        raise RunError(
            f"The training loss is {means.loss} at step {trainer.step}; the last checkpoint is older. Lower "
            f"--learning-rate or raise --warmup-steps."
        )
    log.append(
        "training",
        trainer.step,
        epoch=trainer.batches.epoch,
        loss=means.loss,
        accuracy=means.accuracy,
        learning_rate=trainer.optimizer.param_groups[0]["lr"],
        gradient_norm=float(trainer.gradient_norm),
        loss_scale=trainer.scaler.get_scale(),
        targets_per_s=round(means.targets / trainer.training_s),
    )
    trainer.training_s = 0.0


# ---------------------------------------------------------------------- how all ranks end at the same step


@contextmanager
def stop_signals() -> Iterator[Callable[[], int]]:
    """In the block `STOP_SIGNALS` do not end the process; yields a function that returns the last one, or 0.

    The death of the launcher counts as SIGHUP.
    """
    received, launcher = [0], os.getppid()

    def pending() -> int:
        launcher_is_gone = os.getppid() != launcher
        return received[-1] or (signal.SIGHUP if launcher_is_gone else 0)

    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in STOP_SIGNALS}
    try:
        yield pending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def vote(world: World, signal_number: int) -> str | None:
    """The name of the largest signal number that any rank votes for; None if all vote for 0. Collective.

    A rank that stops alone would leave the others waiting in the next all-reduce. So the ranks vote after every
    step.
    """
    ballot = torch.tensor(signal_number)
    dist.all_reduce(ballot, dist.ReduceOp.MAX, group=world.control)
    return signal.Signals(int(ballot)).name if ballot else None
