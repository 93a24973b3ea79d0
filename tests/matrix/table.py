"""The tables in docs/versions.md: one row for each torch and Python. A run replaces its own rows only.

Each table is known by its header. Frameworks' tests have one of the same kind, and PyTorch's own tests another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HEADER = "| torch | Python | date | passed | failed | skipped | which |\n|---|---|---|---|---|---|---|\n"
WITH_FRAMEWORKS = "| torch | Python | date | passed | failed | skipped | with |\n|---|---|---|---|---|---|---|\n"
UPSTREAM = "| torch | Python | date | tests | pass with torch | of these with minddp |\n|---|---|---|---|---|---|\n"
ROW = re.compile(r"^\| (?P<torch>[0-9][^ |]*) \| (?P<python>3\.\d+) \|.*$", re.MULTILINE)
COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")
FAILED = re.compile(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", re.MULTILINE)
MOST_NAMED = 4


@dataclass(frozen=True)
class Row:
    """What one pair of versions came to. `reason` is why it was not run, and empty if it was.

    `only` are the folders that were run, if not all of them, `packages` the frameworks that they used.
    """

    torch: str
    python: str
    date: str
    counts: dict[str, int]
    failed: tuple[str, ...] = ()
    reason: str = ""
    only: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.reason:
            return f"| {self.torch} | {self.python} | {self.date} | | | | not run: {self.reason} |"
        bad = self.counts.get("failed", 0) + self.counts.get("error", 0)
        named = [f"`{name.replace('|', ' ')}`" for name in self.failed[:MOST_NAMED]]
        if len(self.failed) > MOST_NAMED:
            named.append(f"and {len(self.failed) - MOST_NAMED} more")
        if self.only:
            named.append(f"of {' '.join(self.only)} only")
        named.extend(self.packages)
        numbers = f"{self.counts.get('passed', 0)} | {bad} | {self.counts.get('skipped', 0)}"
        return f"| {self.torch} | {self.python} | {self.date} | {numbers} | {', '.join(named)} |"


@dataclass(frozen=True)
class UpstreamRow:
    """How many of PyTorch's own tests were run, how many pass with it, and how many of these with minddp."""

    torch: str
    python: str
    date: str
    tests: int
    native: int
    subject: int

    def __str__(self) -> str:
        return f"| {self.torch} | {self.python} | {self.date} | {self.tests} | {self.native} | {self.subject} |"


def row_of(
    torch: str,
    python: str,
    date: str,
    output: str,
    only: tuple[str, ...] = (),
    packages: tuple[str, ...] = (),
) -> Row:
    """A row from what pytest printed. A run without a summary did not end."""
    summary = output.strip().rpartition("\n")[2]
    counts = {kind: int(number) for number, kind in COUNT.findall(summary)}
    if not counts:
        return Row(torch, python, date, {}, reason="pytest did not come to an end")
    return Row(torch, python, date, counts, tuple(FAILED.findall(output)), only=only, packages=packages)


def merged(page: str, rows: Sequence[Row | UpstreamRow], header: str = HEADER) -> str:
    """`page` with that table's rows replaced where `rows` has the same versions. Newest torch first.

    Raises:
        ValueError: `page` has no table with this header.
    """
    before, found, rest = page.partition(header)
    if not found:
        raise ValueError(f"The page has no table that begins with {header.splitlines()[0]!r}.")
    lines = {}
    while row := ROW.match(rest):
        lines[row["torch"], row["python"]] = row[0]
        rest = rest[row.end() :].removeprefix("\n")
    lines.update({(row.torch, row.python): str(row) for row in rows})
    table = [lines[key] for key in sorted(lines, key=_as_numbers, reverse=True)]
    return before + header + "".join(f"{line}\n" for line in table) + rest


def _as_numbers(key: tuple[str, str]) -> list[list[int]]:
    return [[int(number) for number in re.findall(r"\d+", version)] for version in key]


def update(page: Path, rows: Sequence[Row | UpstreamRow], header: str = HEADER) -> None:
    page.write_text(merged(page.read_text(), rows, header))
