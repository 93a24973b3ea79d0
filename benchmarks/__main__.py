"""`python -m benchmarks QUESTION`, which is also `minddp bench QUESTION`: a table of questions."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import tyro

QUESTIONS = {
    "versus_torch": "how long does a step take beside torch's DDP, and beside no wrapper?",
    "bucket_size": "how does a step depend on the size of the buckets?",
    "growth": "how does cost grow with tensors, bytes, ranks, and in memory?",
    "collectives": "how long do collectives take by the backend minddp, beside gloo and memcpy?",
    "plots": "draw the figure of versus_torch, and write the tables of all results",
    "everything": "all of the above in this order, with the same options",
    "scaling": "how fast are 1, 2, 4, ... ranks, weak and strong?",
    "parts": "how much does a step gain by each optimisation, and lose by the guard, check_finite and x-ray?",
    "audit": "how much longer is a step that minddp.audit audits?",
    "hosts": "how long does a step take on two hosts with a slow network between them? (needs root)",
    "fewer_bytes": "what do hooks that send fewer bytes save between two hosts, and cost in loss? (needs root)",
    "forecast": "are steps on other numbers of ranks and hosts as forecast predicts? (needs root)",
    "ladder": "what do the steps of each rung of the reference ladder look like?",
    "faults": "what do killed processes cost, by minddp.elastic and by restarts?",
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


if __name__ == "__main__":
    main(sys.argv[1:])
