"""`minddp run`: torchrun, with minddp as torch's DistributedDataParallel in every process of the job.

    minddp run --nproc-per-node 2 train.py --epochs 3
    minddp run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:29400 -m package.train
    minddp xray --out DIR train.py --epochs 3  # the same with --xray DIR, by default on two ranks

Torchrun's parser reads the options and its launcher starts the ranks, in the environment of `execute.py`.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import record

from minddp.compat.install import install
from minddp.tools.job.launcher import RanksFailed, torch_errors_translated
from minddp.tools.launch import on_cpu
from minddp.tools.launch.execute import add_options, environment_of


def main(arguments: Sequence[str]) -> int:
    """Run a job with torchrun's options; returns 0, or the exit status of the rank that failed first."""
    parser = make_parser(
        "minddp run",
        "Run a training script, unchanged, with minddp as torch.nn.parallel.DistributedDataParallel. "
        "Options not listed under minddp are torchrun's.",
    )
    return start_ranks(parser, arguments)


def xray(arguments: Sequence[str]) -> int:
    """`minddp xray`: `minddp run --xray` with other defaults, and --out for the folder."""
    return start_ranks(make_xray_parser(), arguments)


def make_xray_parser() -> ArgumentParser:
    parser = make_parser(
        "minddp xray",
        "Record some training steps on every rank and show where their time goes: in the terminal, as a page "
        "(step.html) and to be loaded again (step.json). Options but --out and those under minddp are torchrun's.",
    )
    parser.add_argument("--out", dest="xray", type=Path, help="folder for the files (%(default)s)")
    parser.set_defaults(nproc_per_node="2", xray=Path("runs/xray"))
    return parser


def make_parser(command: str, description: str) -> ArgumentParser:
    parser = torchrun.get_args_parser()
    parser.prog, parser.description = command, description
    add_options(parser)
    return parser


def start_ranks(parser: ArgumentParser, arguments: Sequence[str]) -> int:
    """Start the ranks and wait until they have ended. Returns 0, or exits with a status and a message."""
    options = parser.parse_args(arguments)
    os.environ.update(environment_of(parser, options))
    # Here too, for ranks that are forked from this process (--run-path --start-method fork).
    if options.on_cpu:
        on_cpu.install()
    if not options.native:
        install()
    try:
        with torch_errors_translated():
            record(torchrun.run)(options)
    except RanksFailed as error:  # killed by a signal, it is 128 and the signal's number, as a shell reports it
        status = error.exit_status if error.exit_status > 0 else 128 - error.exit_status
        parser.exit(status, f"{parser.prog}: {error}\n")
    return 0
