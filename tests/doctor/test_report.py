"""What a person reads."""

from __future__ import annotations

import io
import json
import re

from rich.console import Console

from minddp.doctor.findings import Finding, Verdict
from minddp.doctor.report import Report, show

FINE = Finding("cores", Verdict.FINE, "a: 2 ranks with 1 thread each on 2 cores.")
NOTE = Finding("clocks", Verdict.NOTE, "The clock of b is 90.0 s ahead.", "Have it set by NTP.")
BROKEN = Finding("network", Verdict.BROKEN, "Rank 1 cannot connect to rank 0 at 10.0.0.1.", "Open the firewall.")
CURVE = {4096: 1e-4 + 4096 / 1e9, 2**20: 1e-4 + 2**20 / 1e9}

PLAIN = """\
minddp doctor: 2 ranks on 2 hosts

fine    cores    a: 2 ranks with 1 thread each on 2 cores.
note    clocks   The clock of b is 90.0 s ahead.
                 -> Have it set by NTP.
BROKEN  network  Rank 1 cannot connect to rank 0 at
                 10.0.0.1.
                 -> Open the firewall.

median time          4 KiB    1 MiB     latency + bandwidth
all-reduce, gloo   0.10 ms  1.15 ms     0.10 ms + 1.00 GB/s
broadcast, gloo   10.00 ms        -  0.01 s for 4,096 bytes

1 thing is broken; 1 thing is worth knowing. Not checked
because of that: step, stragglers.
"""


def report(*findings: Finding) -> Report:
    return Report("minddp doctor: 2 ranks on 2 hosts", findings)


def shown(report: Report, **options: object) -> str:
    out = io.StringIO()
    show(report, Console(file=out, width=58, **options))  # type: ignore[arg-type]
    return out.getvalue()


def whole() -> Report:
    return Report(
        "minddp doctor: 2 ranks on 2 hosts",
        (FINE, NOTE, BROKEN),
        curves={"all-reduce, gloo": CURVE, "broadcast, gloo": {4096: 0.01}},
        not_checked=("step", "stragglers"),
    )


def test_the_layout() -> None:
    assert shown(whole()) == PLAIN


def test_colours_change_nothing_else() -> None:
    coloured = shown(whole(), force_terminal=True, color_system="standard", legacy_windows=False)
    assert coloured != PLAIN
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == PLAIN


def test_the_exit_status() -> None:
    assert report(FINE).exit_status == 0
    assert report(FINE, NOTE).exit_status == 0
    assert report(FINE, BROKEN, NOTE).exit_status == 1


def test_the_last_line() -> None:
    assert shown(report(FINE)).endswith("\nNothing is broken.\n")
    assert shown(report(FINE, NOTE, NOTE)).endswith("\nNothing is broken; 2 things are worth knowing.\n")


def test_json_has_all_of_it() -> None:
    told = json.loads(json.dumps(whole().to_json()))
    assert told["verdict"] == "broken"
    assert told["exit_status"] == 1
    assert told["findings"][1] == {"check": "clocks", "verdict": "note", "fact": NOTE.fact, "remedy": NOTE.remedy}
    assert told["not_checked"] == ["step", "stragglers"]
    assert told["seconds_of_bytes"]["broadcast, gloo"] == {"4096": 0.01}
    assert abs(told["fitted"]["all-reduce, gloo"]["bytes_per_s"] - 1e9) < 1e3
