"""`minddp xray`: record some steps of the demo model, or of anyone's script, and show them.

minddp xray --task gpt --out DIR         the demo model, under minddp and under torch's DDP
minddp xray --out DIR script.py ARGS     anyone's script, unchanged, on ranks that this command starts
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from minddp.platform.launcher import RanksFailed, Stopped, launch

if TYPE_CHECKING:
    from minddp.xray.result import Result
    from minddp.xray.xray import XRay

STEPS = range(10, 15)  # the first have the buckets made anew, and find cold caches


def main(arguments: Sequence[str]) -> int:
    """Run `minddp xray` with these arguments; returns the exit status."""
    told = parse(arguments)
    module, passed_on = "minddp.xray.demo", ["--task", told.task, "--bucket-cap-mb", str(told.bucket_cap_mb)]
    if told.script:
        module, passed_on = "minddp.xray.script", ["--ddp", told.ddp, told.script, *told.arguments]
    steps = f"{told.steps.start}:{told.steps.stop}"
    try:
        launch(told.nproc, module, ["--out", str(told.out), "--steps", steps, *passed_on])
    except RanksFailed as error:
        print(f"minddp xray: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        return 128 + stopped.signal_number
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command's own options end where a script's name stands; what follows is the script's."""
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
    told = parser.parse_args(arguments)
    if told.script and not Path(told.script).exists():
        parser.error(f"there is no script {told.script!r} in {Path.cwd()}.")
    return told


def steps_from(text: str) -> range:
    """`FIRST:LAST` as a range.

    Raises:
        argparse.ArgumentTypeError: it is something else, or holds no step.
    """
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST, two numbers of steps, the first smaller.")
    return range(int(first), int(last))


def files_in(folder: Path) -> list[Path]:
    """What is saved: a picture, too, where matplotlib is installed."""
    suffixes = [".html", ".json", *([".png"] if find_spec("matplotlib") else [])]
    return [folder / f"step{suffix}" for suffix in suffixes]


def report(xray: XRay | Result) -> None:
    """Explain in the terminal; on the first rank."""
    xray.explain(Console())
