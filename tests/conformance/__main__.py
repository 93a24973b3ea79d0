"""`python -m tests.conformance`: run PyTorch's tests with its own class, then with the class under test; compare.

Exits with 1 if a test passes with torch's own class and fails with the other.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.conformance import report, runner, upstream
from tests.conformance.selection import CORE, WHEEL, Suite, TestId, matching, read_list
from tests.conformance.swap import NATIVE
from tests.conformance.verdict import Status, Verdict
from tests.matrix import table


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parse(arguments)
    suites = [suite for path in asked.upstream for suite in upstream.suites_in(path)] or WHEEL
    tests = matching(_candidates(asked, suites), asked.k)
    native = _natively(tests, suites, asked)
    passing = [verdict.test for verdict in native if verdict.status is Status.PASS]
    subject = _run(passing, suites, asked.impl, asked)
    rows = report.compare(native, subject, report.read_exempt())
    _tell(rows, asked)
    return 0 if all(row.conforms for row in rows) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    what = "Run PyTorch's tests of DDP with its own class, then with the class under test, and compare."
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=what)
    defaults = runner.Conditions()
    add = parser.add_argument
    add("--impl", default="minddp:DistributedDataParallel", metavar="PKG:CLASS", help="default: %(default)s")
    add("-k", metavar="REGEX", help="only tests whose id contains a match")
    add("-j", "--jobs", type=int, default=defaults.jobs, help="tests at once; default: the number of cores")
    add("--timeout", type=float, default=defaults.limit_s, metavar="S", help="for one test; default: %(default)s")
    add(
        "--world-size", type=int, default=defaults.world_size, help="ranks, where a test leaves it open; default: 2"
    )
    add("--all", action="store_true", help="all tests that may concern DDP, not only those of core.txt")
    add(
        "--upstream",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="a PyTorch checkout, or test files in it",
    )
    add("--reuse-native", action="store_true", help="take the results of torch's own class from the last run")
    add(
        "--out",
        type=Path,
        default=Path("build/conformance"),
        metavar="DIR",
        help="JSON, logs; default: %(default)s",
    )
    add("--table", type=Path, metavar="FILE", help="write the comparison there, as Markdown")
    add("--versions", type=Path, metavar="FILE", help="renew the row of this torch and Python there")
    return parser.parse_args(arguments)


def _candidates(asked: argparse.Namespace, suites: Sequence[Suite]) -> list[TestId]:
    if not (asked.all or asked.upstream):
        return read_list(CORE)
    print(f"looking for tests of DDP in {len(suites)} suites", flush=True)
    tests, errors = runner.discover(suites, NATIVE, _conditions(asked))
    for error in errors:
        print(f"cannot be imported: {error.strip().splitlines()[-1]}")
    return tests


def _natively(tests: Sequence[TestId], suites: Sequence[Suite], asked: argparse.Namespace) -> list[Verdict]:
    """With torch's own class, or from the last such run as far as it went."""
    kept = report.stored(asked.out / f"{NATIVE}.json", asked.world_size) if asked.reuse_native else {}
    missing = [test for test in tests if test not in kept]
    fresh = {verdict.test: verdict for verdict in _run(missing, suites, NATIVE, asked, keep=kept)}
    return [{**kept, **fresh}[test] for test in tests]


def _run(
    tests: Sequence[TestId],
    suites: Sequence[Suite],
    subject: str,
    asked: argparse.Namespace,
    *,
    keep: dict[TestId, Verdict] | None = None,
) -> list[Verdict]:
    """Run, report, and store as JSON, together with the results that are kept."""
    label = subject.replace(":", ".")
    print(f"{len(tests)} tests with {subject}", flush=True)
    verdicts = runner.run(
        tests,
        suites,
        subject,
        _conditions(asked),
        logs=asked.out / label,
        on_verdict=_progress(len(tests)),
    )
    together = {**(keep or {}), **{verdict.test: verdict for verdict in verdicts}}
    report.store(asked.out / f"{label}.json", subject, asked.world_size, list(together.values()))
    return verdicts


def _conditions(asked: argparse.Namespace) -> runner.Conditions:
    return runner.Conditions(asked.jobs, asked.timeout, asked.world_size)


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


def _tell(rows: Sequence[report.Row], asked: argparse.Namespace) -> None:
    print(f"\ntorch's own class: {report.summary(row.native for row in rows)}")
    print(f"{asked.impl}, where it passes: {report.summary(row.subject for row in rows if row.subject)}")
    failed = [row for row in rows if not row.conforms]
    for reason, some in report.by_reason(failed):
        print(f"\n{len(some)} x {reason}")
        print("\n".join(f"    {row.native.test}" for row in some))
    if asked.table is not None:
        command = shlex.join(["python", "-m", "tests.conformance", *sys.argv[1:]])
        asked.table.parent.mkdir(parents=True, exist_ok=True)
        asked.table.write_text(report.table(rows, asked.impl, command))
        print(f"table: {asked.table}; details and logs: {asked.out}")
    if asked.versions is not None:
        table.update(asked.versions, [report.versions_row(rows)], table.UPSTREAM)


if __name__ == "__main__":
    sys.exit(main())
