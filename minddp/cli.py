"""The `minddp` command: a table of subcommands, each in a module that is imported when it is called."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A subcommand: `main(arguments)` of `module` runs it and returns the exit status."""

    module: str
    summary: str


COMMANDS = {
    "train": Command("minddp.train.launch", "train a model data-parallel, on ranks that it starts itself"),
    "run": Command("minddp.compat.run", "run a training script, unchanged, with minddp instead of torch's DDP"),
    "exec": Command("minddp.compat.execute", "the same for any command, such as another launcher"),
    "doctor": Command(
        "minddp.doctor.doctor_command", "check, before a job, whether it will work on these machines"
    ),
    "xray": Command("minddp.xray.command_line", "record steps of a script or the demo: where time goes"),
    "bench": Command("minddp.bench", "measure steps, memory and more beside torch's DDP, and draw the figures"),
    "demo": Command("minddp.train.demo", "train a small GPT for a minute, then compare with torch's DDP"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that `argv` (default: the command line) begins with; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="minddp",
        description="PyTorch's DistributedDataParallel, written again from nothing in readable Python.",
        epilog="\n".join(f"  {name:<8} {command.summary}" for name, command in COMMANDS.items())
        + "\n\nminddp COMMAND --help says more about each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(argv)
    command = importlib.import_module(COMMANDS[parsed.command].module)
    return command.main(parsed.arguments)
