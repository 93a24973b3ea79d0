"""List the mutants that no unit test notices: `python -m tests.mutants core modes/divisor.py --sample 200`."""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter

from tests.mutants.forks import Outcome, outcomes
from tests.mutants.operators import PACKAGE, Mutant, mutants_of


def mutants_in(places: list[str]) -> list[Mutant]:
    """All mutants of these files and folders of minddp/."""
    paths = [
        path
        for place in places
        for path in ([PACKAGE / place] if place.endswith(".py") else sorted((PACKAGE / place).rglob("*.py")))
    ]
    return [mutant for path in paths for mutant in mutants_of(path.relative_to(PACKAGE).as_posix())]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("places", nargs="+", help="files and folders of minddp/")
    parser.add_argument(
        "--tests", nargs="+", help="folders and files of tests/ to run (default: those of the same room)"
    )
    parser.add_argument("--sample", type=int, help="run so many of the mutants (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    mutants = mutants_in(args.places)
    if args.sample is not None and args.sample < len(mutants):
        mutants = random.Random(args.seed).sample(mutants, args.sample)
    tests = args.tests or [place.rpartition("/")[0] if place.endswith(".py") else place for place in args.places]
    ends: list[Outcome] = []
    for outcome in outcomes(mutants, list(dict.fromkeys(tests))):
        ends.append(outcome)
        if outcome.survived:
            print(f"{outcome.mutant}  [{outcome.tests} tests]", flush=True)
        print(f"{len(ends)} of {len(mutants)}", end="\r", file=sys.stderr, flush=True)
    by_operator = Counter(end.mutant.operator for end in ends)
    survived = Counter(end.mutant.operator for end in ends if end.survived)
    print(f"\n{len(ends)} mutants, {len(ends) - survived.total()} noticed, {survived.total()} survived")
    for operator, number in by_operator.most_common():
        print(f"  {operator:28} {number - survived[operator]:5} of {number:5}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
