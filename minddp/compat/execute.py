"""`minddp exec`: any command, in whose Python processes torch's DistributedDataParallel is minddp's.

    minddp exec python train.py             # a script that starts its own ranks
    minddp exec accelerate launch train.py  # another launcher

`minddp run` is this and torchrun.

The command's environment has one more folder at the head of PYTHONPATH; its `sitecustomize` installs minddp in each
Python process when that imports torch. Processes started with `-I`, `-E`, `-S` or another PYTHONPATH escape.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

STARTUP_FOLDER = Path(__file__).parent / "startup"


def installing(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment`, so changed. Where PYTHONPATH is unset or empty no empty entry is added: it would mean `.`"""
    before = environment.get("PYTHONPATH", "")
    others = [folder for folder in before.split(os.pathsep) if folder != str(STARTUP_FOLDER)] if before else []
    return {**environment, "PYTHONPATH": os.pathsep.join([str(STARTUP_FOLDER), *others])}


def main(arguments: Sequence[str]) -> int:
    """Become the command that `arguments` are; returns only if it cannot be run, with 127 as a shell does."""
    parser = argparse.ArgumentParser(
        prog="minddp exec",
        description="Run any command, with minddp in the place of torch.nn.parallel.DistributedDataParallel in its "
        "Python processes: a script that starts its own ranks, or another launcher.",
    )
    parser.add_argument("command", help="what to run, such as python, accelerate or mpirun")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parsed = parser.parse_args(arguments)
    try:
        os.execvpe(parsed.command, [parsed.command, *parsed.arguments], installing(os.environ))
    except OSError as error:
        print(f"minddp exec: {parsed.command}: {error.strerror}.", file=sys.stderr)
    return 127
