"""`minddp xray`: record some steps of the demo model, or of a script, and show them.

minddp xray --task gpt --out DIR         the demo model, under minddp and under torch's DDP
minddp xray --out DIR script.py ARGS     any training script, unchanged, on ranks that this command starts
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from minddp.platform.launcher import RanksFailed, Stopped, launch

STEPS = range(10, 15)  # in the first ones buckets are rebuilt and caches are cold


def main(arguments: Sequence[str]) -> int:
    """Run `minddp xray` with these arguments; returns the exit status."""
    options = parse(arguments)
    try:
        launch(options.nproc, "minddp.xray.worker", list(arguments))
    except RanksFailed as error:
        print(f"minddp xray: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        return 128 + stopped.signal_number
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's own options end at the script's name; what follows is the script's.

    The command and its ranks read the same arguments; `None` reads those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="minddp xray",
        description="Record some training steps on every rank and show where their time goes: in the terminal, as "
        "a page (step.html), as a trace for Perfetto (step.json) and, with matplotlib, as a picture (step.png).",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/xray"), help="folder for the files (%(default)s)")
    parser.add_argument("--nproc", type=int, default=2, help="ranks on this machine (%(default)s)")
    parser.add_argument(
        "--steps",
        type=steps_from,
        default=STEPS,
        metavar="FIRST:LAST",
        help=f"which steps to record, LAST excluded ({STEPS.start}:{STEPS.stop})",
    )
    demo = parser.add_argument_group("the demo model")
    demo.add_argument("--task", choices=("gpt", "digits"), default="gpt", help="what it learns (%(default)s)")
    demo.add_argument(
        "--bucket-cap-mb", type=float, default=0.5, help="buckets small enough to see several (%(default)s)"
    )
    script = parser.add_argument_group("a script of yours")
    script.add_argument("--ddp", choices=("minddp", "torch"), default="minddp", help="whose DDP (%(default)s)")
    script.add_argument("script", nargs="?", help="a Python file that builds a DistributedDataParallel and trains")
    script.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    options = parser.parse_args(arguments)
    if options.script and not Path(options.script).exists():
        parser.error(f"there is no script {options.script!r} in {Path.cwd()}.")
    return options


def steps_from(text: str) -> range:
    """`FIRST:LAST` as a range.

    Raises:
        argparse.ArgumentTypeError: it is something else, or holds no step.
    """
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST, two numbers of steps, the first smaller.")
    return range(int(first), int(last))
