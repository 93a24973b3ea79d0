"""`python -m tests.conformance`: run PyTorch's tests with its own class, then with the class under test; compare.

With `--backend minddp`: with groups of gloo, then with groups of that backend; also the tests of collectives.
Exits with 1 if a test passes with torch's own class, or gloo, and fails with the other.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.conformance import report, runner
from tests.conformance.selection import COLLECTIVES, CORE, WHEEL, TestId, read_list
from tests.conformance.swap import BACKEND, NATIVE
from tests.conformance.verdict import Status, Verdict


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parse(arguments)
    native_subject, subject, lists = NATIVE, asked.impl, [CORE]
    if asked.backend:
        native_subject, subject, lists = f"{BACKEND}gloo", f"{BACKEND}{asked.backend}", [COLLECTIVES, CORE]
    tests = [test for path in lists for test in read_list(path) if re.search(asked.k, str(test))]
    native = _run(tests, native_subject, asked)
    passing = [verdict.test for verdict in native if verdict.status is Status.PASS]
    rows = report.compare(native, _run(passing, subject, asked))
    print(f"\n{native_subject}: {report.summary(row.native for row in rows)}")
    print(f"{subject}, where it passes: {report.summary(row.subject for row in rows if row.subject)}")
    if asked.table is not None:
        command = shlex.join(["python", "-m", "tests.conformance", *sys.argv[1:]])
        asked.table.write_text(report.table(rows, subject, command, native_subject))
        print(f"table: {asked.table}; logs: {asked.out}")
    return 0 if all(row.conforms for row in rows) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    what = "Run PyTorch's tests of DDP with its own class, then with the class under test, and compare."
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=what)
    defaults = runner.Conditions()
    add = parser.add_argument
    add("--impl", default="minddp:DistributedDataParallel", metavar="PKG:CLASS", help="default: %(default)s")
    add("--backend", metavar="NAME", help="compare this backend with gloo, instead of the class with torch's")
    add("-k", metavar="REGEX", default="", help="only tests whose id contains a match")
    add("-j", "--jobs", type=int, default=defaults.jobs, help="tests at once; default: the number of cores")
    add("--timeout", type=float, default=defaults.limit_s, metavar="S", help="for one test; default: %(default)s")
    add("--out", type=Path, default=Path("build/conformance"), metavar="DIR", help="logs; default: %(default)s")
    add("--table", type=Path, metavar="FILE", help="write the comparison there, as Markdown")
    return parser.parse_args(arguments)


def _run(tests: Sequence[TestId], subject: str, asked: argparse.Namespace) -> list[Verdict]:
    print(f"{len(tests)} tests with {subject}", flush=True)
    conditions = runner.Conditions(asked.jobs, asked.timeout)
    logs = asked.out / subject.replace(":", ".")
    return runner.run(tests, WHEEL, subject, conditions, logs=logs, on_verdict=_progress(len(tests)))


def _progress(total: int) -> Callable[[Verdict], None]:
    began_s, done = time.monotonic(), 0

    def on_verdict(verdict: Verdict) -> None:
        nonlocal done
        done += 1
        elapsed_s = time.monotonic() - began_s
        print(
            f"[{done:3}/{total} {elapsed_s:4.0f} s] {verdict.status.value:7} {verdict.seconds:5.1f} s "
            f"{verdict.test}  {verdict.reason[:120]}".rstrip(),
            flush=True,
        )

    return on_verdict


if __name__ == "__main__":
    sys.exit(main())
