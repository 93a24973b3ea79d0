"""Two runs side by side: with torch's own class, and with the class under test."""

from __future__ import annotations

import datetime
import json
import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tests.conformance.selection import HERE, TestId
from tests.conformance.verdict import Status, Verdict
from tests.matrix.table import UpstreamRow

EXEMPT = HERE / "exempt.txt"


@dataclass(frozen=True)
class Row:
    """One test; `subject` is None where torch's own class does not pass, so that there is nothing to compare."""

    native: Verdict
    subject: Verdict | None
    exempt: str | None = None

    @property
    def conforms(self) -> bool:
        return self.subject is None or self.subject.status is Status.PASS or self.exempt is not None

    @property
    def reason(self) -> str:
        said = (self.subject or self.native).reason
        return f"exempt: {self.exempt} ({said})" if self.exempt and said else said


def compare(native: Sequence[Verdict], subject: Sequence[Verdict], exempt: dict[TestId, str]) -> list[Row]:
    with_subject = {verdict.test: verdict for verdict in subject}
    return [Row(verdict, with_subject.get(verdict.test), exempt.get(verdict.test)) for verdict in native]


def read_exempt(path: Path = EXEMPT) -> dict[TestId, str]:
    """Reasons by test.

    Raises:
        ValueError: a line is not `suite::Class.method: why`.
    """
    exempt = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            test, separator, why = line.partition(": ")
            if not (separator and why):
                raise ValueError(f"{path.name} says no reason in the line {line!r}.")
            exempt[TestId.parse(test)] = why
    return exempt


def summary(verdicts: Iterable[Verdict]) -> str:
    """The counts, as in "88 pass, 2 fail"."""
    counts = Counter(verdict.status for verdict in verdicts)
    return ", ".join(f"{counts[status]} {status.value}" for status in Status if counts[status]) or "nothing run"


def by_reason(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """What many have in common first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.reason, []).append(row)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


# ------------------------------------------------------------------ JSON


def installed() -> dict[str, str]:
    """What a stored result depends on."""
    import torch

    return {"torch": torch.__version__, "python": platform.python_version()}


def store(path: Path, subject: str, world_size: int, verdicts: Sequence[Verdict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "subject": subject,
        **installed(),
        "world_size": world_size,
        "tests": [verdict.to_json() for verdict in verdicts],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def stored(path: Path, world_size: int) -> dict[TestId, Verdict]:
    """What `store` wrote there, unless with another torch, Python or number of ranks."""
    if not path.exists():
        return {}
    document = json.loads(path.read_text())
    circumstances = {**installed(), "world_size": world_size}
    if any(document[key] != value for key, value in circumstances.items()):
        return {}
    verdicts = (Verdict.from_json(one) for one in document["tests"])
    return {verdict.test: verdict for verdict in verdicts}


# ------------------------------------------------------------------ the table

_SUITES = {
    "ddp": "Tests of DDP that PyTorch runs on the CPU",
    "ddp@cpu": "Tests of DDP that PyTorch runs on GPUs, rewritten at import to run on the CPU",
    "rpc": "Tests of DDP under RPC and distributed autograd",
    "rpc@cpu": "The same for GPUs, rewritten",
}
_PATH = re.compile(r"(?:/[\w.+-]+)+/(?=[\w.+-])")
_REASON_CHARACTERS = 160


def table(rows: Sequence[Row], subject: str, command: str) -> str:
    """Markdown: what was run, the counts, and a table for each suite."""
    versions = installed()
    compared = [row.subject for row in rows if row.subject is not None]
    lines = [
        "# PyTorch's own tests of DDP",
        "",
        f"Made by `{command}`, with torch {versions['torch']} and Python {versions['python']}. The tests are",
        "those in the installed torch (`torch.testing._internal.distributed`), and nothing of them is copied:",
        "[`tests/conformance`](../tests/conformance) puts another class in the place of torch's and runs them.",
        "",
        f"- torch's own class: {summary(row.native for row in rows)}",
        f"- `{subject}`, where torch's own passes: {summary(compared)}",
    ]
    in_order = sorted(rows, key=lambda row: row.native.test)
    for suite, some in groupby(in_order, key=lambda row: row.native.test.suite):
        lines += ["", f"## {_SUITES.get(suite, suite)}", ""]
        lines += ["| test | torch | under test | reason |", "|---|---|---|---|", *map(_line, some)]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    under_test = row.subject.status.value if row.subject else "not run"
    return f"| {row.native.test.method} | {row.native.status.value} | {under_test} | {_cell(row.reason)} |"


def _cell(reason: str) -> str:
    """On one line, without folders of this machine, not too long."""
    text = _PATH.sub("", " ".join(reason.split())).replace("|", "\\|")
    return text if len(text) <= _REASON_CHARACTERS else text[:_REASON_CHARACTERS] + " ..."


def versions_row(rows: Sequence[Row]) -> UpstreamRow:
    """The counts, for docs/versions.md."""
    python = ".".join(installed()["python"].split(".")[:2])
    native = sum(row.native.status is Status.PASS for row in rows)
    subject = sum(row.subject is not None and row.subject.status is Status.PASS for row in rows)
    today = datetime.date.today().isoformat()
    return UpstreamRow(installed()["torch"], python, today, len(rows), native, subject)
