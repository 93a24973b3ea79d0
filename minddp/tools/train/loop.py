"""A run on one rank, from its first agreement to its last words."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from minddp.platform import streams
from minddp.tools.train.batches import Batches
from minddp.tools.train.checkpoint import State, find_checkpoint, share_newest
from minddp.tools.train.checkpoint_files import CheckpointFiles, Saver, best_interval_s, write_atomically
from minddp.tools.train.cluster import world_sizes
from minddp.tools.train.display import draw, training_line, validation_line
from minddp.tools.train.metrics import MetricsLog, Tracker, waiting
from minddp.tools.train.optimizer import peak_learning_rate
from minddp.tools.train.settings import RunError, Settings, SettingsError, step_range
from minddp.tools.train.stop import CANNOT_WRITE, StopSignals, Vote, reason_to_end
from minddp.tools.train.task import Task, load_task
from minddp.tools.train.trainer import Trainer, wrapper_options
from minddp.tools.train.world import World, check_world, open_world

# What a run has beside the model and the optimizer: paths from `Run`.
STATE = (
    *("first_step", "saved_at_s", "training_s", "trainer.step", "trainer.elapsed_s", "trainer.best_loss"),
    *("trainer.gradient_norm", "trainer.batches.position", "trainer.averages.sums", "trainer.averages.known"),
)


def check_before_start(settings: Settings) -> None:
    """Raise SettingsError for what would fail on the ranks: found here, it is one message, not `nproc`."""
    files = CheckpointFiles(settings.folder, settings.keep)
    checked(settings, files)
    check_folder(settings)
    if settings.overwrite:
        files.discard()


def check_folder(settings: Settings) -> None:
    """Make the run's folder. Raises SettingsError if nothing can be written there."""
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=settings.folder).close()
    except OSError as error:
        raise SettingsError(f"Cannot write to {settings.folder}: {error.strerror}. Name another --out.") from error


def checked(settings: Settings, files: CheckpointFiles | None) -> tuple[Task, State | None]:
    """The task, and the newest checkpoint in `files`. Raises SettingsError for what cannot work here."""
    check_world(settings, os.environ)
    wrapper_options(settings)
    found = None if files is None else find_checkpoint(settings, files)
    task = load_task(settings)
    Batches(task.training, settings, settings.logical_ranks or world_sizes(settings, os.environ)[0])
    return task, found


def run_rank(settings: Settings) -> str:
    """Be the rank that a launcher has started; returns why the run has ended."""
    check_folder(settings)
    with open_world(settings) as world:
        return train(settings, world)


def train(settings: Settings, world: World) -> str:
    """Train until the limit is reached or a signal comes; leave a checkpoint either way. Collective.

    Returns "finished", or the name of the signal.

    Raises:
        Refused: settings that cannot work on some rank; on every rank. Failed: rank 0 cannot write.
    """
    files = CheckpointFiles(settings.folder, settings.keep)
    task, found = world.agreed(lambda: checked(settings, files if world.local_rank == 0 else None))
    checkpoint = share_newest(found, world)
    trainer = world.agreed(lambda: Trainer(settings, world, task))
    if checkpoint is not None:
        trainer.restore(checkpoint)
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        before_step = stack.enter_context(recorded(trainer))
        run = (SurvivingRun if settings.survive else Run)(trainer, signals, files, before_step)
        run.begin(checkpoint)
        return run.to_the_end()


@contextmanager
def recorded(trainer: Trainer) -> Iterator[Callable[[], object]]:
    """Record the steps that --xray and --profile name. Yields what is to be called before each step."""
    settings, folder, began_at = trainer.settings, trainer.settings.folder, trainer.step
    with ExitStack() as stack:
        before: list[Callable[[], object]] = []
        if steps := step_range(settings.xray):
            from minddp.tools.xray.wrappers import Wrappers

            title, files = f"minddp train --task {settings.task}", [folder / "xray.html", folder / "xray.json"]
            wrappers = Wrappers(steps, title, files, then=lambda xray: None)
            stack.push(lambda _kind, error, _trace: wrappers.close(error))
            wrappers.add(trainer.ddp)
            before.append(lambda: wrappers.before_step(trainer.step))
        if (steps := step_range(settings.profile)).stop > began_at:
            first, stop = max(0, steps.start - began_at), steps.stop - began_at
            path = folder / f"profile-{trainer.world.rank}.json"
            profiler = torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=first, warmup=0, active=stop - first, repeat=1),
                on_trace_ready=lambda ended: ended.export_chrome_trace(str(path)),
            )
            stack.enter_context(profiler)
            before.append(lambda: profiler.step() if trainer.step > began_at else None)
        yield lambda: [call() for call in before]


class Run:
    """A trainer between its steps: when to log, validate, save, and end."""

    def __init__(self, trainer: Trainer, signals: StopSignals, files: CheckpointFiles, before_step: Any):
        self.trainer, self.signals, self.before_step = trainer, signals, before_step
        self.settings, self.world = trainer.settings, trainer.world
        self.files, self.saver = files, Saver(files)
        self.saved_at_s = trainer.elapsed_s  # of the run
        self.training_s = 0.0  # since the last training record, without validations and checkpoints
        self.failure: RunError | None = None  # on rank 0: metrics.jsonl cannot be written
        self.log = MetricsLog(self.settings.folder / "metrics.jsonl")

    def begin(self, checkpoint: State | None) -> None:
        """Make the folder that of this run, and say what it is. Collective."""
        trainer, settings = self.trainer, self.settings
        self.log.tracker = Tracker(settings) if settings.track and self.world.is_main else None
        self.world.agreed(lambda: self._take_folder(checkpoint is None) if self.world.is_main else None)
        self._append("event", what="start", ranks=self.world.size, restarts=self.world.restarts)
        self._say(self._facts())
        num_ranks = 0 if checkpoint is None else len(checkpoint["random_states"])
        if num_ranks not in (0, self.world.size):
            self._say(f"The checkpoint is of {num_ranks} ranks: the run goes on behind its samples; other bits.")
        if trainer.step == 0:
            self._validate()  # before training: the loss must be that of a guess

    def _take_folder(self, is_new: bool) -> None:
        self.settings.folder.mkdir(parents=True, exist_ok=True)
        if is_new:
            self.files.discard()
        self.log.forget_after(-1 if is_new else self.trainer.step)
        text = json.dumps(dataclasses.asdict(self.settings), default=str, indent=1)
        write_atomically(self.settings.folder / "settings.json", lambda file: file.write(text.encode()))

    def to_the_end(self) -> str:
        """Take steps until there is a reason to end. Collective."""
        trainer = self.trainer
        started_at = time.monotonic() - trainer.elapsed_s
        verdict = Vote(self.world, 0, trainer.elapsed_s).result()
        reason = reason_to_end(self.settings, trainer.step, verdict)
        while reason is None:
            self.before_step()
            step_began = time.monotonic()
            has_failed = self.failure is not None or self.saver.has_failed
            wanted = CANNOT_WRITE if has_failed else self.signals.wanted
            vote = Vote(self.world, wanted, step_began - started_at)  # See [Note: the vote].
            trainer.optimizer_step()
            verdict = vote.result()
            self.training_s += time.monotonic() - step_began
            trainer.elapsed_s = verdict.elapsed_s
            reason = reason_to_end(self.settings, trainer.step, verdict)
            self._between_steps(reason)
        self._end(reason)
        return reason

    def _between_steps(self, reason: str | None) -> None:
        """What is due after this step; after a signal, no time is spent on a validation. Collective.

        Before a checkpoint come a training record, which fails if the loss is not a number, and a validation, which
        decides whether it is the best.
        """
        settings, trainer = self.settings, self.trainer
        minutes = math.inf if settings.checkpoint_minutes is None else settings.checkpoint_minutes
        is_due = trainer.elapsed_s - self.saved_at_s >= 60 * minutes
        saves = reason is not None or is_due or trainer.step % settings.checkpoint_every == 0
        validates = reason == "finished" or (reason is None and trainer.step % settings.validate_every == 0)
        if saves or trainer.step % settings.log_every == 0:
            self._log_training()
        is_best = validates and self._validate()
        if saves or is_best:
            self._save(is_best=is_best)

    def _save(self, *, is_best: bool) -> None:
        """Collective."""
        began = time.monotonic()
        state = self.trainer.state()
        if state is not None:
            self.saver.save(state, is_best=is_best, began=began)
        self.saved_at_s = self.trainer.elapsed_s
        self._append("event", what="checkpoint")

    def _log_training(self) -> None:
        """Record the averages since the last record. Collective. Raises FloatingPointError for an infinite loss."""
        trainer, steps_s = self.trainer, self.training_s
        means = trainer.averages.over_ranks()
        if not math.isfinite(means.loss):
            raise FloatingPointError(
                f"The training loss is {means.loss} at step {trainer.step}; the last checkpoint is older. "
                f"Lower --learning-rate or raise --warmup-steps."
            )
        record = {
            "step": trainer.step,
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
        if trainer.precision.scaler.is_enabled():
            record["loss_scale"] = trainer.precision.scaler.get_scale()
        self.training_s = trainer.batches.waited_s = 0.0
        self._append("training", **record)
        done = self.settings.progress(trainer.step, trainer.elapsed_s)
        self._say(training_line(record, done, trainer.task.targets_are))

    def _validate(self) -> bool:
        """Validate and record it; True if it is the best so far. Collective."""
        trainer = self.trainer
        means = trainer.validate()
        self._append("validation", **dataclasses.asdict(means))
        self._say(validation_line(trainer.step, means, trainer.task.targets_are))
        is_best = means.loss < trainer.best_loss
        trainer.best_loss = min(means.loss, trainer.best_loss)
        return is_best and trainer.step > 0

    def _say(self, text: str) -> None:
        """On rank 0. Where the reader has ended (`| head`), the run saves and ends."""
        if self.world.is_main:
            try:
                print(text, flush=True)
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would fail when it ends
                self.signals.received = signal.SIGPIPE

    def _append(self, kind: str, **record: Any) -> None:
        now = {"step": self.trainer.step, "elapsed_s": round(self.trainer.elapsed_s, 3)}
        if self.world.is_main and self.failure is None:
            try:
                self.log.append(kind=kind, **now | record)
            except RunError as error:
                self.failure = error

    def _facts(self) -> str:
        settings, world = self.settings, self.world
        parameters = sum(param.numel() for param in self.trainer.model.parameters())
        samples = settings.batch_size * settings.accumulate * self.trainer.num_shares
        return (
            f"{settings.task}: {parameters:,} parameters, {world.size} x {world.device.type} "
            f"({dist.get_backend()}), ddp {settings.ddp}, {settings.precision}, {samples} samples a step, peak "
            f"learning rate {peak_learning_rate(settings, self.trainer.num_shares):.2g}, step {self.trainer.step}"
            f"{f' (restart {world.restarts})' if world.restarts else ''}, {settings.folder}"
        )

    def _end(self, reason: str) -> None:
        """Return when all is written, on every rank: a launcher may kill ranks when one has ended. Collective."""
        self._append("event", what="stop", reason=reason)
        self.world.agreed(lambda: self._flush(draws=reason == "finished"))
        if self.saver.costs_s:
            self._say(self._advice())
        step, seconds = self.trainer.step, self.trainer.elapsed_s
        stopped = f"Stopped by {reason} after step {step}. Continue with --resume yes."
        finished = f"Finished after {step} steps in {seconds:.0f} s; checkpoints in {self.files.folder}."
        self._say(finished if reason == "finished" else stopped)

    def _flush(self, *, draws: bool) -> None:
        """Raises RunError on rank 0 if something could not be written."""
        if self.log.tracker is not None:
            self.log.tracker.close()
        self.saver.wait()
        if self.failure is not None:
            raise self.failure
        if self.world.is_main and draws:
            self._say(draw(self.log, self.settings.folder / "run.png", self.trainer.task.targets_are))

    def _advice(self) -> str:
        cost_s = statistics.median(self.saver.costs_s)
        best_s = best_interval_s(cost_s, 3600 * self.settings.mtbf_hours)
        steps = best_s * self.trainer.step / max(self.trainer.elapsed_s, 1e-9)
        return (
            f"A checkpoint stops training for {1000 * cost_s:.0f} ms. With a failure every "
            f"{self.settings.mtbf_hours:g} hours the best interval is {best_s / 60:.1f} minutes, some {steps:.0f} "
            f"steps (Daly)."
        )


class SurvivingRun(Run):
    """`--survive`: a run that goes on when ranks are lost, and takes back those that are started again.

        what is due since the last step, the shares, the vote | the optimizer
        again, with those that are left, if a rank is lost    | once

    The collectives of a run come before the vote of a step of minddp.elastic, whose session repeats them after a
    loss. One more step follows the last one of the optimizer: it ends the run in place of computing shares. What a
    lost attempt has changed in the run is put back, and what it has written to metrics.jsonl is dropped. So rank 0
    may be lost, too: the next one in order takes its place.
    """

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
                self._append("event", what="generation", number=generation, ranks=self.world.size)
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
