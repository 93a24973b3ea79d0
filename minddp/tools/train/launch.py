"""`minddp train`: check the settings, then start the ranks or be one of them.

If the environment has no variables of a rank, the command starts itself once per rank. Otherwise it is the rank
that a launcher (this command, torchrun or srun) has started. Torch is imported after the command line is parsed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import tyro

from minddp.tools.job.launcher import RanksFailed, Stopped, launch
from minddp.tools.train.cluster import REQUEUE_SIGNALS, REQUEUE_STATUS, place_of_rank, sbatch_file, world_sizes
from minddp.tools.train.settings import AgreedError, RunError, Settings, SettingsError


def main(arguments: Sequence[str]) -> int:
    """Run `minddp train` with these arguments; returns the exit status. docs/training.md lists them."""
    place = place_of_rank(os.environ)
    try:
        settings = parse(arguments)
        if settings.print_sbatch:
            print(sbatch_file(settings, arguments), end="")
            return 0
        return start_ranks(settings, arguments) if place is None else run_rank(settings)
    except (SettingsError, RunError, AgreedError) as error:
        if place is None or place.rank == 0:
            print(f"minddp train: {error}", file=sys.stderr)
        elif not isinstance(error, AgreedError):  # rank 0 does not know of it
            print(f"minddp train (rank {place.rank}): {error}", file=sys.stderr)
        return error.exit_status


def parse(arguments: Sequence[str]) -> Settings:
    """Settings from the command line. Invalid ones end the process with status 2 and an explanation."""
    style = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    return tyro.cli(Settings, prog="minddp train", args=list(arguments), config=style)


def run_rank(settings: Settings) -> int:
    """Be the rank that a launcher has started; returns the exit status."""
    from minddp.tools.train.checks import check_folder
    from minddp.tools.train.loop import train
    from minddp.tools.train.world import open_world

    check_folder(settings)
    with open_world(settings) as world:
        return REQUEUE_STATUS if train(settings, world) in REQUEUE_SIGNALS else 0


def start_ranks(settings: Settings, arguments: Sequence[str]) -> int:
    """Start this command once per rank and wait for all; returns the exit status."""
    from minddp.tools.train.checks import check_before_start

    check_before_start(settings)
    nproc, _ = world_sizes(settings, os.environ)
    # --resume and --overwrite have been checked and carried out; restarted ranks must continue.
    words = ["train", *(word for word in arguments if word != "--overwrite"), "--resume", "auto"]
    if settings.survive:
        from minddp.tools.elastic.launcher import main as start

        restarts = str(settings.max_restarts)
        return start(["--nproc", str(nproc), "--max-restarts", restarts, "-m", "minddp", *words])
    try:
        launch(nproc, "minddp", words, settings.max_restarts)
    except RanksFailed as error:
        raise RunError(f"{error} Continue from the newest checkpoint with --resume auto.") from error
    except Stopped as stopped:
        return REQUEUE_STATUS if stopped.signal_name in REQUEUE_SIGNALS else 128 + stopped.signal_number
    return 0
