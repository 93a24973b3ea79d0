"""`minddp exec`: run any command, with minddp as torch's DistributedDataParallel in its Python processes.

    minddp exec python train.py             # a script that starts its own ranks
    minddp exec accelerate launch train.py  # another launcher
    minddp exec --xray DIR python train.py  # each rank also records some steps, see `tools/xray/wrappers.py`

The command gets one more folder at the head of PYTHONPATH. Its `sitecustomize` installs minddp in each Python
process that imports torch, except in those started with `-I`, `-E`, `-S` or another PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

XRAY_STEPS = "10:15"  # in the first steps, buckets are rebuilt and caches are cold
STARTUP_FOLDER = Path(__file__).parent / "startup"
ON_CPU_PROGRAMS = Path(__file__).parent / "on_cpu" / "bin"


def installing(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with that PYTHONPATH. An empty one gets no empty entry, which would mean `.`."""
    before = environment.get("PYTHONPATH", "")
    others = [folder for folder in before.split(os.pathsep) if folder != str(STARTUP_FOLDER)] if before else []
    return {**environment, "PYTHONPATH": os.pathsep.join([str(STARTUP_FOLDER), *others])}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minddp run`, `exec` and `xray`."""
    ours = parser.add_argument_group("minddp")
    ours.add_argument("--on-cpu", action="store_true", help="run a script for CUDA and NCCL on the CPU and gloo")
    ours.add_argument("--native", action="store_true", help="with torch's own DDP, for comparison")
    ours.add_argument("--xray", type=Path, metavar="DIR", help="record some steps and save the report to DIR")
    ours.add_argument(
        "--steps", default=XRAY_STEPS, metavar="FIRST:LAST", help="steps to record, without LAST (%(default)s)"
    )


def environment_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, str]:
    """The environment that passes these options to `startup`. Invalid ones exit with status 2 and a message."""
    environment = installing(os.environ)
    if options.native:
        environment["MINDDP_NATIVE"] = "1"
    if options.on_cpu:
        environment["MINDDP_ON_CPU"] = "1"
        environment["PATH"] = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{ON_CPU_PROGRAMS}"
    if options.xray is not None:
        try:
            step_range(options.steps)
        except ValueError as error:
            parser.error(str(error))
        environment["MINDDP_XRAY"] = f"{options.steps}:{options.xray.resolve()}"
    return environment


def step_range(text: str) -> range:
    """`FIRST:LAST` as a range of steps. Raises ValueError for anything else."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ValueError(f"{text} is not FIRST:LAST, two step numbers with FIRST smaller than LAST.")
    return range(int(first), int(last))


def main(arguments: Sequence[str]) -> int:
    """Replace this process by the command. Returns 127, as a shell does, if it cannot be run."""
    parser = argparse.ArgumentParser(
        prog="minddp exec",
        description="Run a command, such as another launcher or a script that starts its own ranks, with minddp as "
        "torch.nn.parallel.DistributedDataParallel in its Python processes.",
    )
    add_options(parser)
    parser.add_argument("command", help="the command, such as python, accelerate or mpirun")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parsed = parser.parse_args(arguments)
    environment = environment_of(parser, parsed)
    try:
        os.execvpe(parsed.command, [parsed.command, *parsed.arguments], environment)
    except OSError as error:
        print(f"minddp exec: {parsed.command}: {error.strerror}.", file=sys.stderr)
    return 127
