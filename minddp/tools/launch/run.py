"""`minddp run`: torchrun, with minddp as torch's DistributedDataParallel in every process of the job.

    minddp run --nproc-per-node 2 train.py --epochs 3
    minddp run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:29400 -m package.train
    minddp xray --out DIR train.py --epochs 3  # the same with --xray DIR, by default on two ranks
    minddp audit --out DIR train.py --epochs 3  # the same with --audit DIR
    minddp watch train.py --epochs 3  # torch's own DDP, FSDP2 or neither, watched; by default on two ranks

Torchrun's parser reads the options and its launcher starts the ranks, in the environment of `execute.py`.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import record

from minddp.tools.job.launcher import RanksFailed, torch_errors_translated
from minddp.tools.launch.execute import add_options, environment_of

#: Options of `minddp run` that other commands put before those given.
DEFAULTS = {
    "minddp xray": ("--nproc-per-node", "2", "--xray", "runs/xray"),
    "minddp audit": ("--nproc-per-node", "2", "--audit", "runs/audit"),
    "minddp watch": ("--nproc-per-node", "2", "--native", "--watch"),
}


def main(arguments: Sequence[str], command: str = "minddp run") -> int:
    """Run a job with torchrun's options; returns 0, or exits with the status of the rank that failed first."""
    parser = make_parser(command)
    options = parser.parse_args([*DEFAULTS.get(command, ()), *arguments])
    if options.start_method == "fork":  # of --run-path: ranks would not pass through `startup`
        parser.error("--start-method fork starts ranks without minddp; use spawn, the default.")
    os.environ.update(environment_of(options))
    try:
        with torch_errors_translated():
            record(torchrun.run)(options)
    except RanksFailed as error:  # killed by a signal, it is 128 and the signal's number, as a shell reports it
        status = error.exit_status if error.exit_status > 0 else 128 - error.exit_status
        parser.exit(status, f"{parser.prog}: {error}\n")
    return 0


xray, audit, watch = (partial(main, command=command) for command in DEFAULTS)


def make_parser(command: str) -> ArgumentParser:
    parser = torchrun.get_args_parser()
    parser.prog = command
    parser.description = "torchrun, with minddp as torch.nn.parallel.DistributedDataParallel in the script."
    add_options(parser, out="--audit" if command == "minddp audit" else "--xray")
    return parser
