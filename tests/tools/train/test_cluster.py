"""SLURM, as far as one machine has it: tasks with its variables; several hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.namespaces import Host, two_hosts, why_there_can_be_none
from minddp.tools.train.launch import REQUEUE_STATUS, rank_variables
from minddp.tools.train.settings import Settings
from tests.tools.launch import jobs
from tests.tools.train.runs import end_of, final_bits, records, start, tiny, wait_for_records

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[07-09,12]",
}


def test_a_task_of_srun_knows_its_rank() -> None:
    assert rank_variables(TASK) == {
        "RANK": "6",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "7",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "node07",
        "MASTER_PORT": str(20000 + 7 * 4711 % 10000),
    }
    assert rank_variables({**TASK, "SLURM_STEP_NUM_TASKS": "1"}) == {}  # it starts ranks itself
    assert rank_variables({"RANK": "left over"}) == {}


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [("node1", "node1"), ("a,b", "a"), ("n[3,5-7]", "n3"), ("gpu[001-100]-ib,x9", "gpu001-ib")],
)
def test_the_first_host(nodelist: str, first: str) -> None:
    assert rank_variables({**TASK, "SLURM_STEP_NODELIST": nodelist})["MASTER_ADDR"] == first


def test_tasks_by_node() -> None:
    for node, tasks in enumerate(["2", "2", "2", "1"]):
        assert rank_variables({**TASK, "SLURM_NODEID": str(node)})["LOCAL_WORLD_SIZE"] == tasks
    one = {**TASK, "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}
    assert rank_variables(one)["LOCAL_WORLD_SIZE"] == "4"


def tasks(settings: Settings, **variables: str) -> list[subprocess.Popen[str]]:
    """The two tasks of a step on this machine, as `srun` starts them."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", **variables}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "localhost"}
    return [start(settings, **step, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in range(2)]


@pytest.mark.timeout(500)
def test_a_job_whose_time_is_up_saves_and_goes_on_when_it_is_requeued(tmp_path: Path) -> None:
    settings = tiny(tmp_path / "run", steps=100_000, checkpoint_every=100_000, resume="auto")
    started = tasks(settings)
    wait_for_records(settings.folder, 3, started[0])
    started[1].send_signal(signal.SIGUSR1)
    statuses, output = end_of(*started)
    assert statuses == [REQUEUE_STATUS] * 2, output
    saved_at = final_bits(settings.folder)["step"]

    again = tasks(tiny(settings.folder, steps=saved_at + 3, resume="auto"), SLURM_RESTART_COUNT="1")
    statuses, output = end_of(*again)
    assert statuses == [0, 0], output
    assert [begun["step"] for begun in records(settings.folder, "start")] == [0, saved_at]


# ------------------------------------------------------------------ several hosts

obstacle = why_there_can_be_none()


@pytest.mark.timeout(500)
@pytest.mark.skipif(obstacle is not None, reason=f"no network namespaces here: {obstacle}")
def test_torchrun_on_two_hosts_without_a_shared_disk(tmp_path: Path) -> None:
    """Each host has a folder of its own; in the second run the checkpoint is on one of them only."""
    with two_hosts("10gbit") as hosts:
        for steps in (4, 8):
            agents = [torchrun(host, hosts[0], tmp_path / str(i), steps) for i, host in enumerate(hosts)]
            statuses, output = end_of(*agents)
            assert statuses == [0, 0], output
    folders = [folder for folder in (tmp_path / "0", tmp_path / "1") if (folder / "checkpoints").exists()]
    assert max(final_bits(folder)["step"] for folder in folders) == 8
    assert sorted(begun["step"] for folder in folders for begun in records(folder, "start")) == [0, 4]


def torchrun(host: Host, first: Host, folder: Path, steps: int) -> subprocess.Popen[str]:
    settings = tiny(folder, steps=steps, schedule="constant", resume="auto")
    return start(
        settings,
        *("ip", "netns", "exec", host.namespace, sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", f"steps-{steps}"),
        *("--rdzv-endpoint", f"{first.address}:29400", "--local-addr", host.address),
        *("--rdzv-conf", f"is_host={int(host == first)}"),
        GLOO_SOCKET_IFNAME="eth0",
        PYTHONPATH=str(jobs.ROOT),
    )
