"""Short jobs whose watchdog makes its turns a hundred times as often: its threads are at work when the jobs end.

They end with status 0, and without a message. This module is their script, too.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn

import minddp
from minddp.tools.watchdog import check, comparison, inquiry

MODULE = "tests.tools.watchdog.test_short_jobs"
EVERY_S = 0.01
STEPS = 200
LIMIT_S = 240
TORCHRUN = ("--standalone", "--nproc-per-node", "2", "-m", MODULE, "train")
LAUNCHERS = {
    "mp.spawn": ("-m", MODULE, "spawn"),
    "torchrun": ("-m", "torch.distributed.run", *TORCHRUN),
    "minddp run": ("-m", "minddp", "run", *TORCHRUN),
}
ENDS = ("as it is", "without the wrapper", "without the group")


def train(end: str) -> None:
    """Each rank trains, and ends its script with or without clearing up."""
    faulthandler.dump_traceback_later(LIMIT_S - 10)
    comparison.EVERY_S = inquiry.READ_EVERY_S = EVERY_S
    check.EVERY = 1
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = minddp.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        time.sleep(EVERY_S / 2)
        optimizer.zero_grad()
        ddp(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    if end == "without the wrapper":
        del ddp
        gc.collect()
    elif end == "without the group":
        dist.destroy_process_group()


def spawned(rank: int, port: int, end: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    train(end)


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_ends_quietly(launcher: str, end: str) -> None:
    command = [sys.executable, *LAUNCHERS[launcher], end]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torchrun warns if it is not set
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True) as job:
        try:
            output, _ = job.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            job.terminate()  # a launcher ends its ranks, too
            pytest.fail(f"no end after {LIMIT_S} s: {job.communicate()[0]}")
    assert (job.returncode, output) == (0, "")


if __name__ == "__main__":
    what, end = sys.argv[1:]
    if what == "train":
        train(end)
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
        multiprocessing.spawn(spawned, (free, end), nprocs=2)
