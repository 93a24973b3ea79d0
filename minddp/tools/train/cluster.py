"""The environment that torchrun or SLURM gives a rank, and the file for sbatch."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from minddp.tools.job.place import Place, place_of
from minddp.tools.train.settings import DEFAULT_NPROC, Settings

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
REQUEUE_SIGNALS = ("SIGUSR1", "SIGTERM")
REQUEUE_STATUS = os.EX_TEMPFAIL


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


def place_of_rank(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun or SLURM has given to this process; `None` if it starts the ranks."""
    variables = rank_variables(environment)
    return place_of({**environment, **variables}) if variables else None


def world_sizes(settings: Settings, environment: Mapping[str, str]) -> tuple[int, int]:
    """The number of all ranks and of those on this machine, as the launcher has started or will start them."""
    if not settings.survive and (place := place_of_rank(environment)):
        return place.world_size, place.local_world_size
    nproc = settings.nproc or DEFAULT_NPROC
    return nproc, nproc


def sbatch_file(settings: Settings, arguments: Sequence[str]) -> str:
    """A job of `--nodes` x `--nproc` ranks that continues whenever it is restarted."""
    nproc = settings.nproc or DEFAULT_NPROC
    words = [*(word for word in arguments if word != "--print-sbatch"), "--resume", "auto"]  # the last one counts
    template = (Path(__file__).parent / "train.sbatch").read_text()
    return template.format(
        name=settings.folder.name,
        nodes=settings.nodes,
        nproc=nproc,
        cpus=settings.threads + settings.workers,
        gpus="" if settings.device == "cpu" else f"\n#SBATCH --gpus-per-node={nproc}",
        command=shlex.join(["minddp", "train", *words]),
        requeue_status=REQUEUE_STATUS,
    )
