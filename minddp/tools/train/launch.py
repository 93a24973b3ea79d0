"""`minddp train`: check the settings, then start the ranks or be one of them.

If the environment has no variables of a rank, the command starts itself once per rank. Otherwise it is the rank
that a launcher (this command, torchrun or srun) has started. Torch is imported after the command line is parsed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence

import tyro

from minddp.tools.job.launcher import RanksFailed, Stopped, launch
from minddp.tools.train.settings import RunError, Settings, SettingsError

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
REQUEUE_SIGNALS = ("SIGUSR1", "SIGTERM")
REQUEUE_STATUS = os.EX_TEMPFAIL


def main(arguments: Sequence[str]) -> int:
    """Run `minddp train` with these arguments; returns the exit status. docs/training.md lists them."""
    variables = rank_variables(os.environ)
    try:
        settings = parse(arguments)
        if not variables:
            return start_ranks(settings, arguments)
        os.environ.update(variables)
        return run_rank(settings)
    except RunError as error:
        place = f" (rank {variables['RANK']})" if variables else ""
        print(f"minddp train{place}: {error}", file=sys.stderr)
        return error.exit_status


def parse(arguments: Sequence[str]) -> Settings:
    """Settings from the command line. Invalid ones end the process with status 2 and an explanation."""
    return tyro.cli(Settings, prog="minddp train", args=list(arguments))


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank under torchrun's names; empty if this process starts the ranks.

    In SLURM's notation, `2(x3),1` is two tasks on each of three nodes and one task on the next, and
    `node[07-09,12],login1` is a list of hosts.
    """
    if all(name in environment for name in TORCHRUN_VARIABLES):
        return {name: environment[name] for name in TORCHRUN_VARIABLES}
    num_tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if num_tasks == "1":
        return {}
    job, step, node = (int(environment[f"SLURM_{name}"]) for name in ("JOB_ID", "STEP_ID", "NODEID"))
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment["SLURM_STEP_TASKS_PER_NODE"])
    tasks_by_node = [tasks for tasks, times in groups for _ in range(int(times or 1))]
    first_host = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,]*))?", environment["SLURM_STEP_NODELIST"])
    assert first_host is not None
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": num_tasks,
        "LOCAL_WORLD_SIZE": tasks_by_node[node],
        "MASTER_ADDR": "".join(first_host.groups(default="")),
        # Equal for all tasks of a step, and different for other steps, which may share the host.
        "MASTER_PORT": str(20000 + (7 * job + step) % 10000),
    }


def start_ranks(settings: Settings, arguments: Sequence[str]) -> int:
    """Start this command once per rank and wait for all; returns the exit status."""
    from minddp.tools.train.checkpoint import CheckpointFiles

    CheckpointFiles(settings.folder, settings.keep).check_resume(settings)
    words = ["train", *arguments, "--resume", "auto"]  # restarted ranks must continue
    try:
        launch(settings.nproc or 2, "minddp", words, settings.max_restarts)
    except RanksFailed as error:
        raise RunError(f"{error} Continue from the newest checkpoint with --resume auto.") from error
    except Stopped as stopped:
        return REQUEUE_STATUS if stopped.signal_name in REQUEUE_SIGNALS else 128 + stopped.signal_number
    return 0


def run_rank(settings: Settings) -> int:
    """Be the rank that a launcher has started; returns the exit status."""
    from minddp.tools.train.loop import train
    from minddp.tools.train.world import open_world

    if settings.nproc not in (None, int(local_size := os.environ["LOCAL_WORLD_SIZE"])):
        raise SettingsError(
            f"--nproc {settings.nproc} differs from the {local_size} ranks that the launcher has started on this "
            f"machine; remove --nproc, and set torchrun --nproc-per-node or srun --ntasks-per-node."
        )
    with open_world(settings) as world:
        return REQUEUE_STATUS if train(settings, world) in REQUEUE_SIGNALS else 0
