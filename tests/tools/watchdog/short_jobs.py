"""Short jobs whose watchdog makes its turns a hundred times as often: its threads are at work when the jobs end.

`python -m tests.tools.watchdog.short_jobs 200` runs so many, in turn by each launcher and with each end, and names
those that did not end with status 0, or printed something.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

import minddp
from minddp.tools.watchdog import check, comparison, inquiry

MODULE = "tests.tools.watchdog.short_jobs"
EVERY_S = 0.01
STEPS = 200
LIMIT_S = 240
AT_ONCE = 2
TORCHRUN = ("--standalone", "--nproc-per-node", "2", "-m", MODULE, "train")
LAUNCHERS = {
    "mp.spawn": ("-m", MODULE, "spawn"),
    "torchrun": ("-m", "torch.distributed.run", *TORCHRUN),
    "minddp run": ("-m", "minddp", "run", *TORCHRUN),
}
ENDS = ("as it is", "without the wrapper", "without the group")


def train(end: str) -> None:
    """What each rank does: it trains, and its script is over, after or without clearing up."""
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


def fault_of(launcher: str, end: str) -> str:
    """Run one job. Its status and output if it has not ended quietly with status 0, else nothing."""
    command = [sys.executable, *LAUNCHERS[launcher], end]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torchrun warns if it is not set
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True) as job:
        try:
            output, _ = job.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            job.terminate()  # a launcher ends its ranks, too
            return f"no end after {LIMIT_S} s: {job.communicate()[0]}"
    return f"status {job.returncode}: {output}" if job.returncode or output else ""


def run_many(count: int) -> int:
    """How many have a fault, each of which is printed."""
    run, faulty = Counter[str](), Counter[str]()
    ways = [(launcher, end) for end in ENDS for launcher in LAUNCHERS]
    jobs = [ways[number % len(ways)] for number in range(count)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for (launcher, end), fault in zip(jobs, pool.map(lambda job: fault_of(*job), jobs), strict=True):
            run[launcher] += 1
            if fault:
                faulty[launcher] += 1
                print(f"--- job {run.total()}, by {launcher}, ends {end}: {fault}", flush=True)
            if run.total() % len(ways) == 0:
                print(f"{run.total()} of {count} have ended, {faulty.total()} with a fault", flush=True)
    print("Faulty:", ", ".join(f"{faulty[launcher]} of {run[launcher]} by {launcher}" for launcher in run))
    return faulty.total()


if __name__ == "__main__":
    first, *rest = sys.argv[1:]
    if first == "train":
        train(*rest)
    elif first == "spawn":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
        multiprocessing.spawn(spawned, (free, *rest), nprocs=2)
    else:
        sys.exit(run_many(int(first)) > 0)
