"""`python -m benchmarks QUESTION`, which is also `minddp bench QUESTION`: a table of questions."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from benchmarks.question import path_of

QUESTIONS = {
    "versus_torch": "how long does a step take beside torch's DDP, and beside its lower bounds?",
    "bucket_size": "how does a step depend on the size of the buckets?",
    "growth": "how does cost grow with tensors, bytes, ranks, and in memory?",
    "all_reduce": "how long does an all-reduce take in shared memory, beside gloo?",
    "plots": "draw the figures of all results, and write the tables",
    "everything": "all of the above in this order, with the same options",
    "scaling": "how fast are 1, 2, 4, ... ranks, weak and strong?",
    "parts": "how much does a step gain by each optimisation, and lose by the guard, check_finite and x-ray?",
    "hosts": "how long does a step take on two hosts with a slow network between them? (needs root)",
    "fewer_bytes": "what do hooks that send fewer bytes save between two hosts, and cost in loss? (needs root)",
    "forecast": "are steps on other numbers of ranks and hosts as forecast predicts? (needs root)",
    "ladder": "what do the steps of each rung of the reference ladder look like?",
    "faults": "what do killed processes cost, by minddp.elastic and by restarts?",
    "advice": "does following x-ray's advice gain as much as it predicts? (slow networks need root)",
}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="minddp bench",
        description="Measure minddp beside torch's DistributedDataParallel.",
        epilog="\n".join(f"  {name:<14} {question}" for name, question in QUESTIONS.items())
        + "\n\nminddp bench QUESTION --help lists the options of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("question", choices=QUESTIONS, metavar="QUESTION", help="one of the questions below")
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(argv)
    names = list(QUESTIONS)[:5] if parsed.question == "everything" else [parsed.question]
    for name in names:
        if name == "plots" and len(names) > 1 and parsed.options:
            continue  # a look is not kept, so there is nothing new to draw
        question = importlib.import_module(f"benchmarks.{name}")
        config = tyro.cli(question.Config, prog=f"minddp bench {name}", args=parsed.options)
        question.main(config)
        draw_answer(name, getattr(config, "out", None))


def draw_answer(name: str, directory: Path | None) -> None:
    """Draw the pictures of a question whose answer was written into a directory of the user's."""
    if directory is None or os.environ.get("RANK", "0") != "0" or not path_of(name, directory).exists():
        return
    try:
        from benchmarks import plots
    except ModuleNotFoundError as missing:
        print(f"No picture, because {missing.name} is not installed: pip install 'minddp[bench]'")
        return
    plots.draw(name, json.loads(path_of(name, directory).read_text()), directory)


if __name__ == "__main__":
    main(sys.argv[1:])
