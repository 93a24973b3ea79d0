"""The `minddp` command: a table of subcommands, each in a module that is imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence

from minddp.tools.job.launcher import Stopped

#: A module, whose `main(arguments)`, or the function named, runs the subcommand and returns the exit status; and a
#: summary.
COMMANDS = {
    "train": ("minddp.tools.train.launch", "train a model data-parallel, on ranks that it starts itself"),
    "run": ("minddp.tools.launch.run", "run a training script, unchanged, with minddp instead of torch's DDP"),
    "exec": ("minddp.tools.launch.execute", "the same for any command, such as another launcher"),
    "elastic": ("minddp.tools.elastic.launcher", "run a script that goes on when some of its ranks are lost"),
    "doctor": ("minddp.tools.doctor.doctor_command", "check, before a job, whether it will work on these machines"),
    "xray": ("minddp.tools.launch.run:xray", "record some steps of a script: where their time goes"),
    "audit": ("minddp.tools.launch.run:audit", "measure what each micro-batch of each rank counts in the gradient"),
    "watch": ("minddp.tools.launch.run:watch", "run a script as it is, and warn of problems that raise no error"),
    "forecast": ("minddp.tools.xray.forecast_command", "predict a step on other numbers of ranks and hosts"),
    "bench": ("minddp.tools.bench", "measure steps, memory and more beside torch's DDP, and draw the figure"),
    "demo": ("minddp.tools.demo", "train a small GPT for about a minute, then compare with torch's DDP"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that `argv` (default: the command line) begins with; returns the exit status.

    If a signal stops its ranks, the status is 128 plus the signal's number, as in a shell. The same holds if the
    reader of its output ends, as in `minddp doctor | head`.
    """
    try:
        try:
            return run_subcommand(argv)
        finally:
            sys.stdout.flush()
    except Stopped as stopped:
        return 128 + stopped.signal_number
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout, 0)  # a closed file is always reported
        if not poll.poll(0):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def run_subcommand(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="minddp",
        description="PyTorch's DistributedDataParallel, rewritten from scratch in readable Python.",
        epilog="\n".join(f"  {name:<8} {summary}" for name, (_, summary) in COMMANDS.items())
        + "\n\nminddp COMMAND --help says more about each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(argv)
    module, _, function = COMMANDS[parsed.command][0].partition(":")
    status: int = getattr(importlib.import_module(module), function or "main")(parsed.arguments)
    return status
