"""Search longer: python -m tests.parity --seed 1000 --count 2000; or play one: --script "Script(...)"."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time

from tests.parity.script import Script
from tests.parity.search import Search, new_pool
from tests.parity.side import SUBJECT
from tests.ranks import RankPool


def main() -> int:
    """Exit status 0 where every rule holds, 1 where one is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**9), help="the first script's; else drawn")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--script", type=Script.parsed, help="play this one alone")
    parser.add_argument("--subject", default=SUBJECT, help="module:class")
    asked = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # for the ranks: torch warns in every script
    pools: dict[int, RankPool] = {}
    search = Search(lambda n: pools.setdefault(n, new_pool(n)), asked.subject)
    began = time.monotonic()
    if asked.script is not None:
        failure = search.play(asked.script)
        print(failure or f"no failure; {search.last_notes}")
        return int(failure is not None)
    print(f"scripts {asked.seed} to {asked.seed + asked.count - 1}", flush=True)
    for seed in range(asked.seed, asked.seed + asked.count):
        before = set(search.failures)
        search.from_seed(seed)
        for script in search.failures.keys() - before:
            print(f"{script!r}\n{search.failures[script]}\n", flush=True)
    print(f"{search.played} scripts in {time.monotonic() - began:.0f} s; {dict(search.notes)}")
    print(f"changes: {dict(search.lines.most_common())}")
    return int(bool(search.failures))


if __name__ == "__main__":
    sys.exit(main())
