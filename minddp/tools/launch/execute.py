"""`minddp exec`: run any command, with minddp as torch's DistributedDataParallel in its Python processes.

    minddp exec python train.py             # a script that starts its own ranks
    minddp exec accelerate launch train.py  # another launcher
    minddp exec --xray DIR python train.py  # each rank also records some steps, see `tools/xray/wrappers.py`
    minddp exec --audit DIR python train.py  # or measures what each micro-batch counts, see `tools/audit/`
    minddp exec --watch python train.py     # torch's own class, watched: see `tools/watchdog/watch.py`

The command gets one more folder at the head of PYTHONPATH. Its `sitecustomize` installs minddp in each Python
process that imports torch, except in those started with `-I`, `-E`, `-S` or another PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

STARTUP_FOLDER = Path(__file__).parent / "startup"
ON_CPU_PROGRAMS = Path(__file__).parent / "on_cpu" / "bin"

# In the first steps, buckets are rebuilt and caches are cold.
XRAY_STEPS, AUDIT_STEPS = range(10, 15), range(3, 6)


def add_options(parser: argparse.ArgumentParser, out: str = "--xray") -> None:
    """Add the options of `minddp run`, `exec`, `xray` and `audit`; `--out` is short for the option `out`."""
    ours = parser.add_argument_group("minddp")
    ours.add_argument("--on-cpu", action="store_true", help="run a script for CUDA and NCCL on the CPU and gloo")
    ours.add_argument("--backend", choices=["minddp"], help="shared memory for groups that ask for gloo")
    ours.add_argument("--native", action="store_true", help="with torch's own DDP, for comparison")
    for option, does in (
        ("--xray", "record some steps, with a report in DIR"),
        ("--audit", "measure what each micro-batch counts in some steps, with a report in DIR"),
    ):
        names = [option, "--out"] if option == out else [option]
        ours.add_argument(*names, type=Path, metavar="DIR", help=does)
    ours.add_argument(
        "--watch", action="store_true", help="with torch's own DDP, FSDP2 or neither: warn of problems"
    )
    ours.add_argument("--watch-raises", action="store_true", help="watch, and end at the first problem")
    ours.add_argument("--watch-json", type=writable_file, metavar="FILE", help="watch, and append problems to FILE")
    ours.add_argument(
        "--steps",
        type=step_range,
        default=XRAY_STEPS,
        metavar="FIRST:LAST",
        help="steps, without LAST (10:15; for an audit 3:6)",
    )


def writable_file(text: str) -> Path:
    """Refuse a file that cannot be appended to now, rather than at the first finding."""
    try:
        Path(text).open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}.") from error
    return Path(text)


def step_range(text: str) -> range:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(
            f"{text} is not FIRST:LAST, two step numbers with FIRST smaller than LAST."
        )
    return range(int(first), int(last))


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """The environment that passes these options to `startup`."""
    environment = installing(os.environ)
    watches = options.watch or options.watch_raises or options.watch_json is not None
    if options.native or watches:
        environment["MINDDP_NATIVE"] = "1"
    if options.backend:
        environment["MINDDP_BACKEND"] = options.backend
    if options.on_cpu:
        environment["MINDDP_ON_CPU"] = "1"
        environment["PATH"] = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{ON_CPU_PROGRAMS}"
    if watches:
        file = options.watch_json and str(options.watch_json.resolve())
        environment["MINDDP_WATCH"] = json.dumps({"raises": options.watch_raises, "json": file})
    if options.xray is not None:
        environment["MINDDP_XRAY"] = f"{options.steps.start}:{options.steps.stop}:{options.xray.resolve()}"
    if options.audit is not None:
        steps = AUDIT_STEPS if options.steps is XRAY_STEPS else options.steps
        environment["MINDDP_AUDIT"] = f"{steps.start}:{steps.stop}:{options.audit.resolve()}"
    return environment


def installing(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with the folder. An empty PYTHONPATH gets no empty entry, which would mean `.`."""
    folders = [str(STARTUP_FOLDER), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


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
    options = parser.parse_args(arguments)
    try:
        os.execvpe(options.command, [options.command, *options.arguments], environment_of(options))
    except OSError as error:
        print(f"minddp exec: {options.command}: {error.strerror}.", file=sys.stderr)
    return 127
