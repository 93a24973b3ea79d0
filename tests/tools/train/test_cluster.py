"""SLURM, as far as one machine has it: a fake `srun` that starts tasks with its variables; several hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.namespaces import Host, two_hosts, why_there_can_be_none
from minddp.tools.job.place import Place
from minddp.tools.train.cluster import place_of_rank, rank_variables, sbatch_file
from minddp.tools.train.launch import parse
from minddp.tools.train.settings import Settings
from tests.tools.train.runs import command_line, final_bits, records, tiny

ROOT = Path(__file__).parents[3]
PATIENCE_S = 240.0

# Starts the tasks of one step on one node, passes signals on, and returns the highest exit code.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
assert sys.argv[1] == "--kill-on-bad-exit=1"
n = os.environ["FAKE_TASKS"]
step = {{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": n, "SLURM_STEP_TASKS_PER_NODE": n,
        "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "localhost"}}
task = lambda i: {{**os.environ, **step, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}}
tasks = [subprocess.Popen(sys.argv[2:], env=task(i)) for i in range(int(n))]
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = '#!/bin/sh\necho "$@" >> "$FAKE_LOG"\n'


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
    assert place_of_rank(TASK) == Place(6, 7, "node07", 20000 + 7 * 4711 % 10000, local_rank=0)
    assert place_of_rank({**TASK, "SLURM_PROCID": "0"}).hosts_store
    assert place_of_rank({**TASK, "SLURM_STEP_NUM_TASKS": "1"}) is None  # it starts ranks itself
    assert place_of_rank({"RANK": "left over"}) is None


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


def test_the_job_has_the_settings_and_continues() -> None:
    words = ["--nproc", "8", "--steps", "9", "--resume=yes", "--print-sbatch", "--nodes=2", "--task-options", "a=1"]
    text = sbatch_file(Settings(nproc=8, nodes=2, steps=9, workers=3, out=Path("runs/x")), words)
    for line in ("--job-name=x", "--nodes=2", "--ntasks-per-node=8", "--cpus-per-task=4", "--gpus-per-node=8"):
        assert f"#SBATCH {line}\n" in text
    given = "--nproc 8 --steps 9 --resume=yes --nodes=2 --task-options a=1"
    assert f"srun --kill-on-bad-exit=1 minddp train {given} --resume auto &\n" in text
    assert parse([*given.split(), "--resume", "auto"]).resume == "auto"
    assert "gpus" not in sbatch_file(Settings(device="cpu"), [])


def job(folder: Path, settings: Settings) -> tuple[list[str], dict[str, str]]:
    """The command and the environment in which SLURM would run the job."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "job.sbatch").write_text(sbatch_file(settings, command_line(settings)))
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    fakes = {"FAKE_TASKS": "2", "FAKE_LOG": str(folder / "log"), "PATH": path, "PYTHONPATH": str(ROOT)}
    return ["bash", str(folder / "job.sbatch")], {**os.environ, **fakes, "SLURM_JOB_ID": str(os.getpid())}


@pytest.mark.timeout(500)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_job_whose_time_is_up_saves_is_requeued_and_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    """SLURM sends SIGUSR1 to the tasks; preemption sends SIGTERM to the script."""
    settings = tiny(tmp_path / "run", steps=100_000, checkpoint_every=100_000)
    command, environment = job(tmp_path, settings)
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + PATIENCE_S
    while len(records(settings.folder, "training")) < 3:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]) if number == signal.SIGUSR1 else process.pid, number)
    output = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 0, output
    assert (tmp_path / "log").read_text() == f"requeue {os.getpid()}\n"
    saved_at = final_bits(settings.folder)["step"]

    goal = tiny(settings.folder, steps=saved_at + 3)
    command, environment = job(tmp_path, goal)
    done = subprocess.run(
        command, env={**environment, "SLURM_RESTART_COUNT": "1"}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert final_bits(settings.folder)["step"] == saved_at + 3
    assert [event["step"] for event in records(settings.folder, "event") if event["what"] == "start"] == [
        0,
        saved_at,
    ]
    assert (tmp_path / "log").read_text().count("requeue") == 1


# ------------------------------------------------------------------ several hosts

obstacle = why_there_can_be_none()


@pytest.mark.timeout(500)
@pytest.mark.skipif(obstacle is not None, reason=f"no network namespaces here: {obstacle}")
def test_torchrun_on_two_hosts_without_a_shared_disk(tmp_path: Path) -> None:
    """Each host has a folder of its own; in the second run the checkpoint is on one of them only."""
    with two_hosts("10gbit") as hosts:
        for steps in (4, 8):
            agents = [torchrun(host, hosts[0], tmp_path / str(i), steps) for i, host in enumerate(hosts)]
            outputs = [agent.communicate(timeout=PATIENCE_S)[0] for agent in agents]
            assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    folders = [folder for folder in (tmp_path / "0", tmp_path / "1") if (folder / "checkpoints").exists()]
    assert max(final_bits(folder)["step"] for folder in folders) == 8
    starts = [event["step"] for folder in folders for event in records(folder, "event") if event["what"] == "start"]
    assert sorted(starts) == [0, 4]


def torchrun(host: Host, first: Host, folder: Path, steps: int) -> subprocess.Popen[str]:
    settings = tiny(folder, steps=steps, schedule="constant", resume="auto")
    return subprocess.Popen(
        [
            *("ip", "netns", "exec", host.namespace, sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", f"steps-{steps}"),
            *("--rdzv-endpoint", f"{first.address}:29400", "--local-addr", host.address),
            *("--rdzv-conf", f"is_host={int(host == first)}"),
            *("-m", "minddp", "train", *command_line(settings)),
        ],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
