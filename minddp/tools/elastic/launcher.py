"""`minddp elastic`: start ranks that survive each other, and the store that outlives them.

The launcher holds the store and does not train. A rank that fails is started again; the other ranks go on.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial

import psutil
import torch.distributed as dist

from minddp.tools.elastic.membership import Membership
from minddp.tools.elastic.session import NUM_RANKS, STORE_PORT
from minddp.tools.elastic.term import LOOK_EVERY_S
from minddp.tools.job.launcher import GRACE_S, STOP_SIGNALS


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks and wait until all have ended. Returns 0 if training has finished."""
    parser = argparse.ArgumentParser(prog="minddp elastic", description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start (default: 2)")
    parser.add_argument("--max-restarts", type=int, default=3, help="of each rank (default: 3)")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, help="the script that each rank runs, and its arguments"
    )
    options = parser.parse_args(arguments)
    if not options.script or options.nproc < 1:
        parser.error("Name a script to run, and --nproc of 1 or more.")
    environment = dict(os.environ)
    # The server looks up the name of each process that connects, and all others wait: 5 s if an answer is lost.
    os.environ["RES_OPTIONS"] = "attempts:0"
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment |= {STORE_PORT: str(store.port), NUM_RANKS: str(options.nproc)}
    # In the ranks, torch looks up the name of each peer that it connects to.
    environment.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # lost connections are expected
    if options.nproc > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun
    command = [sys.executable, *(["-m"] if options.is_module else []), *options.script]
    if stopped_by := run_ranks(command, environment, options.nproc, options.max_restarts):
        return 128 + stopped_by
    return 0 if Membership(store).settled("finished") else 1


def run_ranks(command: Sequence[str], environment: Mapping[str, str], num_ranks: int, max_restarts: int) -> int:
    """Run `num_ranks` processes, and start each one again if it fails, up to `max_restarts` times.

    Returns 0 once all have ended, or the number of a signal, which has stopped the ranks.
    """
    signals: list[int] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _frame: signals.append(number))
    # In sessions of their own: Ctrl-C reaches the launcher only.
    start = partial(psutil.Popen, command, env=environment, start_new_session=True)
    restarts_left = {start(): max_restarts for _ in range(num_ranks)}
    while restarts_left and not signals:
        ended, _ = psutil.wait_procs(restarts_left, LOOK_EVERY_S)
        for rank in ended:
            left = restarts_left.pop(rank)
            if rank.returncode != 0 and left > 0:
                restarts_left[start()] = left - 1
            elif rank.returncode != 0:
                print(f"minddp elastic: {rank} has failed, without restarts left.", file=sys.stderr)
    for rank in restarts_left:
        rank.terminate()
    for rank in psutil.wait_procs(restarts_left, GRACE_S)[1]:
        rank.kill()
    return signals[0] if signals else 0
