"""`python -m minddp.elastic`: start ranks that survive each other, and the store that outlives them.

    launcher            holds the store, does not train
     +- agent           torch's elastic agent: starts its rank, and starts it again if it fails
     |   +- rank
     +- agent
         +- rank
     ...

Each rank has an agent of its own, since an agent restarts all of its ranks when one fails.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from minddp.platform.launcher import local_config
from minddp.tools.elastic.session import NUM_RANKS, STORE


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m minddp.elastic", description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start on this host (default: 2)")
    parser.add_argument("--max-restarts", type=int, default=3, help="of each rank (default: 3)")
    parser.add_argument(
        "--store",
        default="localhost:0",
        help="HOST:PORT: on the first host where to hold the store; on others, with --join, where it is",
    )
    parser.add_argument("--join", action="store_true", help="the store is held by the launcher on another host")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="what each rank runs, with its arguments")
    parsed = parser.parse_args(arguments)
    if not parsed.script or (parsed.join and parsed.store == parser.get_default("store")):
        parser.error("Name a script to run, and with --join also a --store.")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks and wait until all have ended. Returns 0 if training has finished."""
    parsed = parse(arguments)
    context = multiprocessing.get_context("fork")  # before the store starts threads
    agents = []
    for _ in range(parsed.nproc):
        ours, theirs = context.Pipe()
        agent = context.Process(target=_run_agent, args=(theirs, parsed))
        agent.start()
        theirs.close()
        agents.append((agent, ours))

    import torch.distributed as dist

    host, _, port = parsed.store.rpartition(":")
    if parsed.join:
        store = dist.TCPStore(host, int(port), is_master=False)
    else:
        # The server looks up the name of each process that connects, for its messages, and meanwhile all others
        # wait: 5 s if the answer is lost. So this process asks no name server.
        os.environ["RES_OPTIONS"] = "attempts:0"
        store = dist.TCPStore("localhost", int(port), is_master=True, wait_for_workers=False)
    for _, pipe in agents:
        pipe.send(f"{host}:{store.port}")
    stopped_by = 0

    def stop(signal_number: int, _frame: object) -> None:
        nonlocal stopped_by
        stopped_by = signal_number
        for agent, _ in agents:
            agent.terminate()  # torch's agent ends its rank, too

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, stop)
    for agent, _ in agents:
        agent.join()
    if stopped_by:
        return 128 + stopped_by
    return 0 if store.check(["finished"]) else 1


def _run_agent(pipe: Connection, parsed: argparse.Namespace) -> None:
    """The body of an agent's process: one of torch's, for one rank."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    os.environ[STORE], os.environ[NUM_RANKS] = pipe.recv(), str(parsed.nproc)
    # Torch looks up the name of each peer that it connects to, too.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # connections that are lost are no news
    if parsed.nproc > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher passes it on
    try:
        script = ["-m", *parsed.script] if parsed.is_module else parsed.script
        elastic_launch(local_config(1, parsed.max_restarts), sys.executable)(*script)
    except ChildFailedError as error:
        sys.exit(f"A rank has failed {parsed.max_restarts + 1} times and is not started again: {error}")
    except SignalException:
        sys.exit(1)
