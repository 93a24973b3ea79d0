"""`minddp train`: check the settings, then start the ranks or be one of them.

Without RANK and WORLD_SIZE in its environment the command starts itself once per rank; with them, it is the rank
that a launcher, ours or torchrun, has started.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import tyro
from rich.console import Console

from minddp.platform.launcher import RanksFailed, Stopped, launch
from minddp.train.settings import Settings, SettingsError


def main(arguments: Sequence[str]) -> int:
    """Run `minddp train` with these arguments; returns the exit status."""
    from minddp.train.world import is_rank, open_world, world_sizes

    console = Console(stderr=True, highlight=False)
    try:
        settings = parse(arguments)
        check_before_start(settings)
        if is_rank(os.environ):
            from minddp.train.loop import train

            with open_world(settings) as world:
                train(settings, world)
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


def _advice(settings: Settings) -> str:
    """How to go on after a failure."""
    from minddp.train.checkpoint import Checkpoint, checkpoint_path

    path = checkpoint_path(settings)
    if not path.exists():
        return "There is no checkpoint yet."
    step = Checkpoint.load(path).step
    return f"The last checkpoint is {path}, of step {step}; continue from it with --resume."
