"""`minddp train`: check everything, start the ranks, and say what became of them.

The launcher is torchrun's own (torch.distributed.launcher), so there is one way for a rank to come to life.
Started plainly, `minddp train` checks its settings and has the launcher run the same command once per rank;
started by a launcher, ours or torchrun, it finds RANK and WORLD_SIZE in its environment and is one of the
ranks.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import tyro
from rich.console import Console

from minddp.train.settings import Settings, SettingsError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

GRACE_S = 30  # the launcher's default between asking a rank to end and killing it


class RanksFailed(RuntimeError):
    """A rank ended other than by finishing; the message names it and says how."""


class Stopped(Exception):
    """A signal reached the launcher; every rank has been told, and has ended."""

    def __init__(self, signal_number: int):
        self.signal_number = signal_number
        super().__init__(f"Stopped by {signal.Signals(signal_number).name}.")


def main(arguments: Sequence[str]) -> int:
    """Run `minddp train` with these arguments; returns the exit status."""
    from minddp.train.world import is_rank, world_sizes

    console = Console(stderr=True, highlight=False)
    try:
        settings = parse(arguments)
        check_before_start(settings)
        if is_rank(os.environ):
            run_rank(settings)
        else:
            nproc, _ = world_sizes(settings, os.environ)
            launch(nproc, "minddp", ["train", *arguments])
    except SettingsError as error:
        if os.environ.get("RANK", "0") == "0":
            console.print(f"minddp train: {error}", markup=False, soft_wrap=True)
        return 2
    except RanksFailed as error:
        console.print(f"minddp train: {error} {_advice(settings)}", markup=False, soft_wrap=True)
        return 1
    except Stopped as stopped:
        return 128 + stopped.signal_number
    return 0


def parse(arguments: Sequence[str]) -> Settings:
    """Settings from the command line; exits with status 2 and an explanation where they cannot work."""
    style = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    return tyro.cli(Settings, prog="minddp train", args=list(arguments), config=style)


def check_before_start(settings: Settings) -> None:
    """Raise SettingsError for what would fail on the ranks: found here, it is one message and not `nproc` of them.

    Reads the data to be sure that there is enough of it; that takes a fraction of a second.
    """
    from minddp.train.batches import BatchStream
    from minddp.train.checkpoint import check_checkpoint
    from minddp.train.tasks import load_task
    from minddp.train.world import check_world, world_sizes
    from minddp.train.wrap import check_wrapper

    check_world(settings, os.environ)
    check_wrapper(settings)
    world_size, _ = world_sizes(settings, os.environ)
    check_checkpoint(settings, world_size)
    BatchStream(load_task(settings).training, settings.batch_size, 0, world_size, settings.seed)
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"Cannot make the folder {settings.folder}: {error.strerror}. Name another --out."
        ) from error


def run_rank(settings: Settings) -> None:
    """Be one of the ranks."""
    from minddp.train.loop import train
    from minddp.train.world import open_world

    with open_world(settings) as world:
        train(settings, world)


def launch(nproc: int, module: str, arguments: Sequence[str]) -> None:
    """Run `python -m module arguments` as `nproc` ranks on this machine, and wait until all have ended.

    Each rank has a session of its own, so Ctrl-C on the terminal reaches the launcher alone. It passes the
    signal on and gives the ranks 30 s to save and leave. When a rank fails, the others are ended in the same
    way.

    Raises:
        RanksFailed: a rank failed or was killed. Stopped: a signal came.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # port 0: any that is free
        local_addr="localhost",
        max_restarts=0,
    )
    with _one_voice():
        try:
            elastic_launch(config, sys.executable)("-m", module, *arguments)
        except ChildFailedError as error:
            raise RanksFailed(describe_failure(error)) from None
        except SignalException as stopped:
            raise Stopped(stopped.sigval) from None
        except KeyboardInterrupt:  # before the launcher listens for signals
            raise Stopped(signal.SIGINT) from None


@contextmanager
def _one_voice() -> Iterator[None]:
    """Keep the launcher's log quiet: what it would report line by line, `main` says once."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler = logging.NullHandler()
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = propagates
        logger.removeHandler(handler)


def describe_failure(error: ChildFailedError) -> str:
    """What to look at first. One failure brings others, and their order in time is known to the second only.

    A rank that dies makes the others fail at once; a rank that fails makes the launcher terminate the others and,
    after its 30 s of grace, kill those that hang.
    """
    first = min(failure.timestamp for failure in error.failures.values())
    hung = [rank for rank, failure in error.failures.items() if failure.timestamp - first > GRACE_S / 2]

    def remoteness(rank: int) -> tuple[bool, bool]:
        exitcode = error.failures[rank].exitcode
        return rank in hung or exitcode == -signal.SIGTERM, exitcode > 0

    rank = min(error.failures, key=remoteness)
    failure = error.failures[rank]
    how = f"failed with exit status {failure.exitcode}; its error is above"
    if failure.exitcode < 0:
        how = f"was killed by {failure.signal_name()}"
    hanging = "".join(f" Rank {rank} did not answer and was killed then." for rank in hung)
    return f"Rank {rank} (pid {failure.pid}) {how}.{hanging}"


def _advice(settings: Settings) -> str:
    """How to go on after a failure."""
    from minddp.train.checkpoint import Checkpoint, checkpoint_path

    path = checkpoint_path(settings)
    if not path.exists():
        return "There is no checkpoint yet."
    step = Checkpoint.load(path).step
    return f"The last checkpoint is {path}, of step {step}; continue from it with --resume."
