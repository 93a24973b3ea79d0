"""A run on one rank: what happens before, between and after the optimizer steps."""

from __future__ import annotations

import dataclasses
import math
import os
import time

from minddp.platform import streams
from minddp.tools.train.checkpoint import CheckpointFiles, State, find_checkpoint, share_newest
from minddp.tools.train.metrics import MetricsLog
from minddp.tools.train.settings import AgreedError, Settings
from minddp.tools.train.stop import StopSignals, vote
from minddp.tools.train.task import load_task
from minddp.tools.train.trainer import Trainer
from minddp.tools.train.world import World


def train(settings: Settings, world: World) -> str:
    """Train until a limit is reached or a signal comes, and write a checkpoint. Collective.

    Returns "finished", or the name of the signal.

    Raises:
        AgreedError: the settings cannot work on some rank, or rank 0 cannot write a checkpoint.
    """
    files = CheckpointFiles(settings.folder, settings.keep)
    found = world.agreed(lambda: find_checkpoint(settings, files) if world.local_rank == 0 else None)
    checkpoint = share_newest(found, world)
    task = world.agreed(lambda: load_task(settings))
    trainer = world.agreed(lambda: Trainer(settings, world, task))
    if checkpoint is not None:
        trainer.restore(checkpoint)
    log = world.agreed(lambda: open_log(settings, world, files, None if checkpoint is None else trainer.step))
    started_at = time.monotonic() - trainer.elapsed_s
    report_start(trainer, log, checkpoint)
    if trainer.step == 0:
        report_validation(trainer, log)  # an untrained model should have the loss of a guess

    with StopSignals() as signals:

        def reason_to_end() -> str | None:
            signal_name, trainer.elapsed_s = vote(world, signals.pending, time.monotonic() - started_at)
            is_finished = settings.progress(trainer.step, trainer.elapsed_s) == 1.0
            return signal_name or ("finished" if is_finished else None)

        reason = reason_to_end()
        while reason is None:
            trainer.optimizer_step()
            reason, step = reason_to_end(), trainer.step
            saves = reason is not None or step % settings.checkpoint_every == 0
            if saves or step % settings.log_every == 0:
                report_training(trainer, log)  # raises an error if the loss is not finite, so it is not saved
            if reason == "finished" or (reason is None and step % settings.validate_every == 0):
                report_validation(trainer, log)
            if saves:
                save(trainer, files)
    report_end(trainer, log, reason)
    return reason


def open_log(settings: Settings, world: World, files: CheckpointFiles, resumed_at: int | None) -> MetricsLog:
    """The log of the run, whose folder has nothing of an older run, and no records that will be written again."""
    log = MetricsLog(settings.folder / "metrics.jsonl", writes=world.is_main)
    if resumed_at is None and world.local_rank == 0:
        files.discard()
    if world.is_main:
        settings.folder.mkdir(parents=True, exist_ok=True)
        log.forget_after(-1 if resumed_at is None else resumed_at)
    return log


def save(trainer: Trainer, files: CheckpointFiles) -> None:
    """Write a checkpoint on rank 0. Collective, so no rank ends before it is on the disk."""
    state = trainer.state()
    trainer.world.agreed(lambda: None if state is None else files.write(state))


def report_start(trainer: Trainer, log: MetricsLog, checkpoint: State | None) -> None:
    settings, num_ranks = trainer.settings, trainer.world.size
    parameters = sum(param.numel() for param in trainer.model.parameters())
    place = f"{num_ranks} x {trainer.world.device.type}, ddp {settings.ddp}, step {trainer.step}, {settings.folder}"
    text = f"{settings.task}: {parameters:,} parameters, {place}"
    num_before = 0 if checkpoint is None else len(checkpoint["of_ranks"])
    if num_before not in (0, num_ranks):
        text += f"\nThe checkpoint is from {num_before} ranks; the run continues with other bits."
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    record = {"ranks": num_ranks, "restarts": restarts, "settings": dataclasses.asdict(settings)}
    log.append(text, kind="start", step=trainer.step, **record)


def report_training(trainer: Trainer, log: MetricsLog) -> None:
    """Report the averages since the last report. Collective. Raises AgreedError if the loss is not finite."""
    means = trainer.averages.over_ranks()
    if not math.isfinite(means.loss):
        raise AgreedError(
            f"The training loss is {means.loss} at step {trainer.step}; the last checkpoint is older. Lower "
            f"--learning-rate or raise --warmup-steps.",
            1,
        )
    record = {
        "step": trainer.step,
        "epoch": trainer.batches.epoch,
        "loss": means.loss,
        "accuracy": means.accuracy,
        "learning_rate": trainer.optimizer.param_groups[0]["lr"],
        "gradient_norm": float(trainer.gradient_norm),
        "loss_scale": trainer.scaler.get_scale(),
        "targets_per_s": means.targets / trainer.training_s,
        "memory_mib": round(streams.peak_memory_bytes(trainer.world.device) / 2**20),
        "elapsed_s": trainer.elapsed_s,
    }
    trainer.training_s = 0.0
    text = "step {step}  loss {loss:.3f}  lr {learning_rate:.2e}  {targets_per_s:,.0f} {unit}/s  {memory_mib} MiB"
    done = trainer.settings.progress(trainer.step, trainer.elapsed_s)
    log.append(f"{done:4.0%}  " + text.format(unit=trainer.task.targets_are, **record), kind="training", **record)


def report_validation(trainer: Trainer, log: MetricsLog) -> None:
    """Validate, and report the result. Collective."""
    step, means = trainer.step, trainer.validate()
    text = (
        f"step {step}  validation loss {means.loss:.3f}  perplexity {math.exp(min(means.loss, 700)):.2f}  "
        f"accuracy {means.accuracy:.1%} of {means.targets:,} {trainer.task.targets_are}"
    )
    log.append(text, kind="validation", step=step, **dataclasses.asdict(means))


def report_end(trainer: Trainer, log: MetricsLog, reason: str) -> None:
    step, seconds = trainer.step, trainer.elapsed_s
    stopped = f"Stopped by {reason} after step {step}. Continue with --resume auto."
    finished = (
        f"Finished after {step} steps in {seconds:.0f} s; checkpoints in {trainer.settings.folder / 'checkpoints'}."
    )
    log.append(finished if reason == "finished" else stopped, kind="end", step=step, reason=reason)
