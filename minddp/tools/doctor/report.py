"""The result of one check, and the report of all results as text or JSON."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minddp.platform import wording


class Severity(str, enum.Enum):
    """Only BROKEN keeps a job from working."""

    FINE = "fine"
    NOTE = "note"
    BROKEN = "BROKEN"


STYLES = {Severity.FINE: "bold green", Severity.NOTE: "bold yellow", Severity.BROKEN: "bold red"}


@dataclass(frozen=True)
class CheckResult:
    """The `fact` names ranks and hosts; the `remedy` is empty if nothing is wrong."""

    check: str
    severity: Severity
    fact: str
    remedy: str = ""


def judged(check: str, problems: Iterable[CheckResult], fine: str) -> list[CheckResult]:
    return list(problems) or [CheckResult(check, Severity.FINE, fine)]


def differing(value_of_rank: Mapping[int, str], form: str = "{value} on {ranks}") -> str:
    """The ranks grouped by value: `2.13.0 on ranks 0-2; 2.12.1 on rank 3`."""
    groups = wording.by_value(value_of_rank).items()
    return "; ".join(form.format(value=value, ranks=wording.ranks(ranks)) for value, ranks in groups)


@dataclass(frozen=True)
class Report:
    """The results of all checks. `facts`, `measured`: by rank. `not_checked`: made impossible by a broken one."""

    title: str
    findings: Sequence[CheckResult]
    not_checked: Sequence[str] = ()
    facts: Mapping[int, Any] = field(default_factory=dict)
    measured: Mapping[int, Any] = field(default_factory=dict)

    def count(self, severity: Severity) -> int:
        return sum(finding.severity is severity for finding in self.findings)

    @property
    def exit_status(self) -> int:
        return 1 if self.count(Severity.BROKEN) else 0


def show(report: Report, console: Console) -> None:
    grid = Table.grid(padding=(0, 2))
    for finding in report.findings:
        remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
        severity = Text(finding.severity.value, STYLES[finding.severity])
        grid.add_row(severity, finding.check, Text(finding.fact + remedy))
    worst = max((finding.severity for finding in report.findings), key=list(Severity).index)
    console.print(Text(f"{report.title}\n", "bold"), grid, Text(f"\n{_conclusion(report)}", STYLES[worst]))


def _conclusion(report: Report) -> str:
    broken, notes = report.count(Severity.BROKEN), report.count(Severity.NOTE)
    verb = "is" if broken == 1 else "are"
    text = f"{wording.count(broken, 'thing')} {verb} broken" if broken else "Nothing is broken"
    if notes:
        text += f"; {wording.count(notes, 'thing')} {'is' if notes == 1 else 'are'} worth knowing"
    if report.not_checked:
        text += f". Not checked because of that: {', '.join(report.not_checked)}"
    return f"{text}."
