"""The rank that this process is: by torchrun's variables, or by SLURM's; and the file that sbatch takes."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from minddp.tools.train.settings import DEFAULT_NPROC, Settings

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
REQUEUE_SIGNALS = ("SIGUSR1", "SIGTERM")
REQUEUE_STATUS = os.EX_TEMPFAIL


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank, as torchrun names them; none if this process is to start ranks."""
    if all(name in environment for name in TORCHRUN_VARIABLES):
        return {name: environment[name] for name in TORCHRUN_VARIABLES}
    return slurm_variables(environment)


def world_sizes(settings: Settings, environment: Mapping[str, str]) -> tuple[int, int]:
    """Ranks in all, and ranks on this machine: as the launcher has started, or will start."""
    if not settings.survive and (variables := rank_variables(environment)):
        return int(variables["WORLD_SIZE"]), int(variables["LOCAL_WORLD_SIZE"])
    nproc = settings.nproc or DEFAULT_NPROC
    return nproc, nproc


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for one of several tasks of a step of SLURM; none for any other process."""
    num_tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if num_tasks == "1":
        return {}
    job, step, node = (int(environment[f"SLURM_{name}"]) for name in ("JOB_ID", "STEP_ID", "NODEID"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": num_tasks,
        "LOCAL_WORLD_SIZE": tasks_by_node(environment["SLURM_STEP_TASKS_PER_NODE"])[node],
        "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
        # The same for all tasks of a step, another one for other steps that may share the host.
        "MASTER_PORT": str(20000 + (7 * job + step) % 10000),
    }


def first_host(nodelist: str) -> str:
    """The first of SLURM's list of hosts, such as `node[07-09,12],login1`."""
    found = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodelist)
    assert found is not None
    return "".join(part or "" for part in found.groups())


def tasks_by_node(text: str) -> list[str]:
    """SLURM's `2(x3),1` means two tasks on each of three nodes, and one on the next."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [tasks for tasks, times in parts for _ in range(int(times or 1))]


def sbatch_file(settings: Settings, arguments: Sequence[str]) -> str:
    """A job of `--nodes` x `--nproc` ranks that continues whenever it is started again."""
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
