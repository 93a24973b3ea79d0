"""`minddp train`: check the settings, then start the ranks or be one of them.

Without a rank's variables in its environment the command starts itself once per rank; with them, it is the rank
that a launcher, ours, torchrun or srun, has started. Torch is imported after the command line has been read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import tyro

from minddp.platform.launcher import RanksFailed, Stopped, launch
from minddp.tools.train.cluster import REQUEUE_SIGNALS, REQUEUE_STATUS, rank_variables, sbatch_file, world_sizes
from minddp.tools.train.settings import Failed, Refused, RunError, Settings, SettingsError


def main(arguments: Sequence[str]) -> int:
    """Run `minddp train` with these arguments; returns the exit status. docs/training.md lists them."""
    rank = rank_variables(os.environ).get("RANK")
    try:
        settings = parse(arguments)
        if settings.print_sbatch:
            print(sbatch_file(settings, arguments), end="")
            return 0
        from minddp.tools.train.loop import check_before_start, run_rank

        if rank is not None:
            return REQUEUE_STATUS if run_rank(settings) in REQUEUE_SIGNALS else 0
        check_before_start(settings)
        nproc, _ = world_sizes(settings, os.environ)
        # What --resume and --overwrite ask for is checked and done; ranks that are started again continue.
        words = ["train", *(word for word in arguments if word != "--overwrite"), "--resume", "auto"]
        if settings.survive:
            from minddp.tools.elastic.launcher import main as start

            restarts = str(settings.max_restarts)
            return start(["--nproc", str(nproc), "--max-restarts", restarts, "-m", "minddp", *words])
        launch(nproc, "minddp", words, settings.max_restarts)
    except (SettingsError, RunError) as error:
        if rank in (None, "0") or not isinstance(error, Refused | Failed):  # others would say the same
            _complain(rank, str(error))
        return 2 if isinstance(error, SettingsError) else 1
    except RanksFailed as error:
        _complain(rank, f"{error} Continue from the newest checkpoint with --resume auto.")
        return 1
    except Stopped as stopped:
        is_to_go_on = stopped.signal_name in REQUEUE_SIGNALS
        return REQUEUE_STATUS if is_to_go_on else 128 + stopped.signal_number
    return 0


def parse(arguments: Sequence[str]) -> Settings:
    """Settings from the command line; exits with status 2 and an explanation where they cannot work."""
    style = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    return tyro.cli(Settings, prog="minddp train", args=list(arguments), config=style)


def _complain(rank: str | None, text: str) -> None:
    who = f" (rank {rank})" if rank not in (None, "0") else ""
    print(f"minddp train{who}: {text}", file=sys.stderr)
