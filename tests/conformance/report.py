"""Two runs side by side: with torch's own class or gloo, and with what is under test."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from minddp.platform import wording
from tests.conformance.swap import BACKEND, NATIVE
from tests.conformance.verdict import Status, Verdict


@dataclass(frozen=True)
class Row:
    """One test; `subject` is None where torch's own class does not pass, so that there is nothing to compare."""

    native: Verdict
    subject: Verdict | None

    @property
    def conforms(self) -> bool:
        return self.subject is None or self.subject.status is Status.PASS

    @property
    def passes_both(self) -> bool:
        return self.subject is not None and self.conforms

    @property
    def reason(self) -> str:
        return (self.subject or self.native).reason


def compare(native: Sequence[Verdict], subject: Sequence[Verdict]) -> list[Row]:
    with_subject = {verdict.test: verdict for verdict in subject}
    return [Row(verdict, with_subject.get(verdict.test)) for verdict in native]


def summary(verdicts: Iterable[Verdict]) -> str:
    """The counts, as in "88 pass, 2 fail"."""
    counts = Counter(verdict.status for verdict in verdicts)
    return ", ".join(f"{counts[status]} {status.value}" for status in Status if counts[status]) or "nothing run"


def installed() -> dict[str, str]:
    """What a stored result depends on."""
    import torch

    return {"torch": torch.__version__, "python": platform.python_version()}


# ------------------------------------------------------------------ the table

_SUITES = {
    "ddp": "Tests of DDP that PyTorch runs on the CPU",
    "ddp@cpu": "Tests of DDP that PyTorch runs on GPUs, here on the CPU",
    "rpc": "Tests of DDP under RPC and distributed autograd",
    "rpc@cpu": "The same for GPUs, on the CPU",
    "collectives-3": "Tests of collectives on three ranks",
    "collectives-4": "Tests of collectives on four ranks",
    "collectives-8": "Tests of collectives on eight ranks",
}
_PATH = re.compile(r"(?:/[\w.+-]+)+/(?=[\w.+-])")
_REASON_CHARACTERS = 160


def table(rows: Sequence[Row], subject: str, command: str, native: str = NATIVE) -> str:
    """Markdown: what was run, the counts; for each suite the tests that do not pass with both, then the others."""
    theirs, short, of_what, kind = "torch's own class", "torch's own", "of DDP", "class"
    if subject.startswith(BACKEND):
        theirs = short = native.removeprefix(BACKEND)
        of_what, kind = "of collectives", "backend"
    versions = installed()
    compared = [row.subject for row in rows if row.subject is not None]
    lines = [
        f"# PyTorch's own tests {of_what}",
        "",
        f"Made by `{command}`, with torch {versions['torch']} and Python {versions['python']}. The tests",
        "are those of the installed torch (`torch.testing._internal.distributed`). "
        "[`tests/conformance`](../tests/conformance) puts",
        f"another {kind} in the place of torch's and runs them.",
        "",
        f"- {theirs}: {summary(row.native for row in rows)}",
        f"- `{subject.removeprefix(BACKEND)}`, where {short} passes: {summary(compared)}",
    ]
    in_order = sorted(rows, key=lambda row: row.native.test)
    for suite, some in groupby(in_order, key=lambda row: row.native.test.suite):
        lines += ["", f"## {_SUITES.get(suite, suite)}", "", *_lines_of(list(some))]
    return "\n".join(lines) + "\n"


def _lines_of(rows: Sequence[Row]) -> list[str]:
    passed = [row.native.test.method for row in rows if row.passes_both]
    others = [_line(row) for row in rows if not row.passes_both]
    lines = ["| test | torch | under test | reason |", "|---|---|---|---|", *others] if others else []
    if passed:
        lines += [""] if others else []
        lines += ["<details>", f"<summary>{wording.count(len(passed), 'test')}: pass with both</summary>", ""]
        lines += [*(f"- {method}" for method in passed), "", "</details>"]
    return lines


def _line(row: Row) -> str:
    under_test = row.subject.status.value if row.subject else "not run"
    return f"| {row.native.test.method} | {row.native.status.value} | {under_test} | {_cell(row.reason)} |"


def _cell(reason: str) -> str:
    """On one line, without folders of this machine, not too long."""
    text = _PATH.sub("", " ".join(reason.split())).replace("|", "\\|")
    return text if len(text) <= _REASON_CHARACTERS else text[:_REASON_CHARACTERS] + " ..."
