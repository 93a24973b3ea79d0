"""`python -m benchmarks QUESTION`, which is also `minddp bench QUESTION`: a table of questions."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import tyro

QUESTIONS = {
    "versus_torch": "how long does a step take beside torch's DDP, and beside what no wrapper can beat?",
    "memory": "how much memory does a wrapper take, and how many bytes does it copy in a step?",
    "bucket_size": "how does a step depend on the size of the buckets?",
    "hook_cost": "what does one parameter cost when nothing is communicated?",
    "all_reduce": "how long does an all-reduce take in shared memory, beside gloo?",
    "hosts": "how long does a step take on two hosts with a slow network between them? (needs root)",
    "ladder": "what do the steps of each rung of the reference ladder look like?",
    "xray_cost": "what does recording cost a step?",
    "plots": "draw what has been measured, and write its tables for the README",
    "everything": "all that the figures show, one after another, and the figures",
}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="minddp bench",
        description="Measure minddp beside torch's DistributedDataParallel.",
        epilog="\n".join(f"  {name:<14} {question}" for name, question in QUESTIONS.items())
        + "\n\nminddp bench QUESTION --help tells more about each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("question", choices=QUESTIONS, metavar="QUESTION", help="one of the questions below")
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(argv)
    question = importlib.import_module(f"benchmarks.{parsed.question}")
    question.main(tyro.cli(question.Config, prog=f"minddp bench {parsed.question}", args=parsed.options))


if __name__ == "__main__":
    main(sys.argv[1:])
