"""The report: findings, what was measured, the facts behind them; for a person to read, or as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minddp.doctor.facts import RankFacts
from minddp.doctor.findings import Finding, Verdict, count, size
from minddp.doctor.fit import fit_line
from minddp.doctor.verdicts.speed import Curve, describe

WORDS = {Verdict.FINE: "fine", Verdict.NOTE: "note", Verdict.BROKEN: "BROKEN"}
_STYLES = {Verdict.FINE: "green", Verdict.NOTE: "yellow", Verdict.BROKEN: "bold red"}


@dataclass(frozen=True)
class Report:
    """What a rank has to report: of all ranks, or of itself alone if it did not get to the others.

    `not_checked` names what was left out because of what was found; `left_behind` that threads still hang in calls
    which do not return.
    """

    title: str
    findings: tuple[Finding, ...]
    curves: Mapping[str, Curve] = field(default_factory=dict)
    facts: Mapping[int, RankFacts] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    not_checked: tuple[str, ...] = ()
    is_of_all: bool = True

    @property
    def worst(self) -> Verdict:
        return max(finding.verdict for finding in self.findings)

    @property
    def exit_status(self) -> int:
        return 1 if self.worst is Verdict.BROKEN else 0

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "verdict": WORDS[self.worst].lower(),
            "exit_status": self.exit_status,
            "findings": [
                {
                    "check": finding.check,
                    "verdict": WORDS[finding.verdict].lower(),
                    "fact": finding.fact,
                    "remedy": finding.remedy,
                }
                for finding in self.findings
            ],
            "not_checked": list(self.not_checked),
            "seconds_of_bytes": {name: dict(curve) for name, curve in self.curves.items()},
            "fitted": {name: fit_line(curve)._asdict() for name, curve in self.curves.items() if len(curve) > 1},
            "measured": dict(self.measured),
            "ranks": [told.to_json() for told in self.facts.values()],
        }


def show(report: Report, console: Console) -> None:
    """Print it: the same lines in the same order, with or without colours."""
    console.print(Text(report.title, style="bold"))
    console.print()
    console.print(_findings(report))
    if report.curves:
        console.print()
        console.print(_curves(report.curves))
    console.print()
    console.print(_conclusion(report))


def _findings(report: Report) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in report.findings:
        style = _STYLES[finding.verdict]
        table.add_row(Text(WORDS[finding.verdict], style), Text(finding.check), Text(finding.fact))
        if finding.remedy:
            table.add_row("", "", Text(f"-> {finding.remedy}", style="bold"))
    return table


def _curves(curves: Mapping[str, Curve]) -> Table:
    sizes = sorted({nbytes for curve in curves.values() for nbytes in curve})
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    for _ in (*sizes, "latency + bandwidth"):
        table.add_column(justify="right", no_wrap=True)
    table.add_row("median time", *(size(nbytes) for nbytes in sizes), "fitted")
    for name, curve in curves.items():
        times = [f"{curve[nbytes] * 1e3:.2f} ms" if nbytes in curve else "-" for nbytes in sizes]
        table.add_row(name, *times, describe(fit_line(curve)) if len(curve) > 1 else "-")
    return table


def _conclusion(report: Report) -> Text:
    broken = sum(finding.verdict is Verdict.BROKEN for finding in report.findings)
    notes = sum(finding.verdict is Verdict.NOTE for finding in report.findings)
    worth = f"{count(notes, 'thing')} {'is' if notes == 1 else 'are'} worth knowing" if notes else ""
    if not broken:
        return Text(f"Nothing is broken{'; ' + worth if worth else ''}.", style="bold green")
    told = f"{count(broken, 'thing')} {'is' if broken == 1 else 'are'} broken{'; ' + worth if worth else ''}."
    if report.not_checked:
        told += f" Not checked because of that: {', '.join(report.not_checked)}."
    return Text(told, style="bold red")
