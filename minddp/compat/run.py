"""`minddp run`: torchrun, but in every process of the job torch's DistributedDataParallel is minddp's.

    minddp run --nproc-per-node 2 train.py --epochs 3
    minddp run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:29400 -m package.train

The options are torchrun's own, read by its parser and carried out by its launcher. All that is added is the
environment (see `execute.py`), which reaches the ranks and whatever they spawn or start, however deep. For scripts
that start their own ranks, and for other launchers, there is `minddp exec`.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record

from minddp.compat.execute import installing
from minddp.compat.install import install


def main(arguments: Sequence[str]) -> int:
    """Run a job with torchrun's options; returns 0, or the exit status of the rank that failed first."""
    options = parse(arguments)
    if mistake := find_mistake(options):
        return _say(mistake, status=2)
    os.environ.update(installing(os.environ))
    install()  # here too, for ranks that are forked from this process (--run-path --start-method fork)
    try:
        record(torchrun.run)(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _say(describe(rank, failure), status=exit_status(failure))
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0


def parse(arguments: Sequence[str]) -> Namespace:
    """Torchrun's options; exits with status 2 and an explanation where they cannot be read."""
    parser = torchrun.get_args_parser()
    parser.prog = "minddp run"
    parser.description = (
        "Run a training script, unchanged, with minddp in the place of torch.nn.parallel.DistributedDataParallel. "
        "All options are torchrun's."
    )
    return parser.parse_args(arguments)


def find_mistake(options: Namespace) -> str | None:
    """What would fail on every rank, or with a traceback of the launcher's."""
    try:
        torchrun.parse_min_max_nnodes(options.nnodes)
        torchrun.determine_local_world_size(options.nproc_per_node)
    except (ValueError, RuntimeError) as error:
        return f"{error} (--nnodes {options.nnodes} --nproc-per-node {options.nproc_per_node})."
    script = Path(options.training_script)
    if not options.module and not options.no_python and not script.exists():
        return f"There is no script {str(script)!r} in {Path.cwd()}. For a module, add -m."
    return None


def describe(rank: int, failure: ProcessFailure) -> str:
    how = f"ended with exit status {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"was killed by {failure.signal_name()}"
    return f"Rank {rank} (pid {failure.pid}) {how}."


def exit_status(failure: ProcessFailure) -> int:
    """As a shell reports it: 128 and the signal's number for a process that was killed."""
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def _say(message: str, *, status: int) -> int:
    print(f"minddp run: {message}", file=sys.stderr)
    return status
