"""A finding, and the report of all findings as text or JSON."""

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
    """How bad a finding is. A job works with everything but BROKEN."""

    FINE = "fine"
    NOTE = "note"
    BROKEN = "BROKEN"


STYLES = {Severity.FINE: "green", Severity.NOTE: "yellow", Severity.BROKEN: "red"}


@dataclass(frozen=True)
class Finding:
    """One result of `check`: the `fact`, with the ranks and hosts in question, and the `remedy` if there is one."""

    check: str
    severity: Severity
    fact: str
    remedy: str = ""


def judged(check: str, problems: Iterable[Finding], fine: str) -> list[Finding]:
    return list(problems) or [Finding(check, Severity.FINE, fine)]


def differing(value_of_rank: Mapping[int, str], form: str = "{value} on {ranks}") -> str:
    """`2.13.0 on ranks 0-2; 2.12.1 on rank 3`."""
    groups = wording.by_value(value_of_rank).items()
    return "; ".join(form.format(value=value, ranks=wording.ranks(ranks)) for value, ranks in groups)


@dataclass(frozen=True)
class Report:
    """The findings, and the facts and measurements behind them by rank. `not_checked` depends on what is broken."""

    title: str
    findings: Sequence[Finding]
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
        style = f"bold {STYLES[finding.severity]}"
        grid.add_row(Text(finding.severity.value, style), finding.check, Text(finding.fact + remedy))
    worst = max((finding.severity for finding in report.findings), key=list(Severity).index)
    conclusion = Text(f"\n{_conclusion(report)}", f"bold {STYLES[worst]}")
    console.print(Text(f"{report.title}\n", "bold"), grid, conclusion)


def _conclusion(report: Report) -> str:
    broken, notes = report.count(Severity.BROKEN), report.count(Severity.NOTE)
    verb = "is" if broken == 1 else "are"
    text = f"{wording.count(broken, 'thing')} {verb} broken" if broken else "Nothing is broken"
    if notes:
        text += f"; {wording.count(notes, 'thing')} {'is' if notes == 1 else 'are'} worth knowing"
    if report.not_checked:
        text += f". Not checked because of that: {', '.join(report.not_checked)}"
    return f"{text}."
