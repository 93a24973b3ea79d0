"""The report: findings, what was measured, the facts behind them; for a person to read, or as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from minddp.doctor.facts import RankFacts
from minddp.doctor.findings import Finding, Verdict, count, size
from minddp.doctor.fit import fit_line
from minddp.doctor.verdicts.speed import Curve, describe

WORDS = {Verdict.FINE: "fine", Verdict.NOTE: "note", Verdict.BROKEN: "BROKEN"}
_STYLES = {Verdict.FINE: "green", Verdict.NOTE: "yellow", Verdict.BROKEN: "red"}
_WORD = max(map(len, WORDS.values()))
_NARROWEST = 40  # columns for facts


@dataclass(frozen=True)
class Report:
    """What a rank has to report: of all ranks, or of itself alone if it did not get to the others.

    `not_checked` names what was left out because of what was found.
    """

    title: str
    findings: tuple[Finding, ...]
    curves: Mapping[str, Curve] = field(default_factory=dict)
    facts: Mapping[int, RankFacts] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    not_checked: tuple[str, ...] = ()

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
    lines = [Text(report.title, style="bold"), Text(), *_findings(report.findings, console.width)]
    if report.curves:
        lines += [Text(), *_table_of(report.curves)]
    conclusion = textwrap.wrap(_conclusion(report), console.width, break_on_hyphens=False)
    lines += [Text(), *(Text(line, style=f"bold {_STYLES[report.worst]}") for line in conclusion)]
    for line in lines:
        console.print(line, soft_wrap=True)


def _findings(findings: Sequence[Finding], width: int) -> Iterator[Text]:
    """`verdict  check  fact` with facts and remedies folded to the right of that."""
    checks = max(len(finding.check) for finding in findings)
    indent = " " * (_WORD + 2 + checks + 2)
    room = max(_NARROWEST, width - len(indent))
    for finding in findings:
        first, *others = textwrap.wrap(finding.fact, room, break_on_hyphens=False)
        head = Text(WORDS[finding.verdict].ljust(_WORD), style=f"bold {_STYLES[finding.verdict]}")
        yield head.append(f"  {finding.check.ljust(checks)}  {first}", style="default")
        remedy = textwrap.wrap(f"-> {finding.remedy}", room, subsequent_indent="   ", break_on_hyphens=False)
        for line in [*others, *(remedy if finding.remedy else [])]:
            yield Text(indent + line)


def _table_of(curves: Mapping[str, Curve]) -> Iterator[Text]:
    """Median times by size, one line for each collective, and what was fitted to them."""
    sizes = sorted({nbytes for curve in curves.values() for nbytes in curve})
    rows = [("median time", *map(size, sizes), "latency + bandwidth")]
    for name, curve in curves.items():
        times = [f"{curve[nbytes] * 1e3:.2f} ms" if nbytes in curve else "-" for nbytes in sizes]
        rows.append((name, *times, describe(curve)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        yield Text("  ".join([name.ljust(widths[0]), *aligned]))


def _conclusion(report: Report) -> str:
    broken = sum(finding.verdict is Verdict.BROKEN for finding in report.findings)
    notes = sum(finding.verdict is Verdict.NOTE for finding in report.findings)
    told = f"{count(broken, 'thing')} {'is' if broken == 1 else 'are'} broken" if broken else "Nothing is broken"
    if notes:
        told += f"; {count(notes, 'thing')} {'is' if notes == 1 else 'are'} worth knowing"
    if report.not_checked:
        told += f". Not checked because of that: {', '.join(report.not_checked)}"
    return f"{told}."
