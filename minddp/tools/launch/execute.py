"""`minddp exec`: any command, in whose Python processes torch's DistributedDataParallel is minddp's.

    minddp exec python train.py             # a script that starts its own ranks
    minddp exec accelerate launch train.py  # another launcher
    minddp exec --xray DIR python train.py  # and each rank records some steps, see `tools/xray/wrappers.py`

The command's environment has one more folder at the head of PYTHONPATH; its `sitecustomize` installs minddp in each
Python process when that imports torch. Processes started with `-I`, `-E`, `-S` or another PYTHONPATH escape.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

STEPS = "10:15"  # that x-ray records: in the first ones buckets are rebuilt and caches are cold
STARTUP_FOLDER = Path(__file__).parent / "startup"
ON_CPU_PROGRAMS = Path(__file__).parent / "on_cpu" / "bin"


def installing(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment`, so changed. Where PYTHONPATH is unset or empty no empty entry is added: it would mean `.`"""
    before = environment.get("PYTHONPATH", "")
    others = [folder for folder in before.split(os.pathsep) if folder != str(STARTUP_FOLDER)] if before else []
    return {**environment, "PYTHONPATH": os.pathsep.join([str(STARTUP_FOLDER), *others])}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `minddp run`, `exec` and `xray` have in common."""
    ours = parser.add_argument_group("minddp")
    ours.add_argument("--on-cpu", action="store_true", help="run what asks for CUDA and NCCL on the CPU and gloo")
    ours.add_argument("--native", action="store_true", help="the same with torch's own DDP, for comparing")
    ours.add_argument("--xray", type=Path, metavar="DIR", help="record some steps and save what they show to DIR")
    ours.add_argument("--steps", default=STEPS, metavar="FIRST:LAST", help="which, LAST is excluded (%(default)s)")


def environment_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, str]:
    """What these options mean to `startup`; exits with status 2 and an explanation where they mean nothing."""
    from minddp.tools.train.settings import step_range

    environment = installing(os.environ)
    if options.native and not (options.on_cpu or options.xray):
        parser.error("--native is for comparing with --on-cpu; for torch's own DDP on GPUs there is torchrun.")
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


def main(arguments: Sequence[str]) -> int:
    """Become the command that `arguments` are; returns only if it cannot be run, with 127 as a shell does."""
    parser = argparse.ArgumentParser(
        prog="minddp exec",
        description="Run any command, with minddp in the place of torch.nn.parallel.DistributedDataParallel in its "
        "Python processes: a script that starts its own ranks, or another launcher.",
    )
    add_options(parser)
    parser.add_argument("command", nargs="?", help="what to run, such as python, accelerate or mpirun")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.error("there is no command. For instance: minddp exec python train.py")
    environment = environment_of(parser, parsed)
    try:
        os.execvpe(parsed.command, [parsed.command, *parsed.arguments], environment)
    except OSError as error:
        script = Path(parsed.command)
        is_python = script.suffix == ".py" and script.is_file()
        remedy = f" Type: minddp exec {shlex.join(['python', *arguments])}" if is_python else ""
        print(f"minddp exec: {parsed.command}: {error.strerror}.{remedy}", file=sys.stderr)
    return 127
