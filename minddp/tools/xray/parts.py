"""Where the time of a step goes: the rows of the table in the terminal and on the page. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minddp.platform.wording import size
from minddp.tools.xray.timeline import Activity, RankStep, Step

NOTABLE_NS = 5_000  # shorter times are written as 0.00 ms


class Row(NamedTuple):
    """A time for each column; `activity` is None in rows that are no activity, or one module's part of it."""

    label: str
    times_ns: list[int]
    activity: Activity | None = None


def rows_of(columns: Sequence[tuple[Step, RankStep]]) -> list[Row]:
    """Activities, with the parts of several modules, then the whole; without rows that have no notable time."""
    ranks = [rank for _, rank in columns]
    modules = dict.fromkeys(span.module for rank in ranks for span in rank.spans if span.module)
    rows = []
    for activity in Activity:
        rows.append(Row(activity.value, [rank.parts_ns[activity] for rank in ranks], activity))
        for name in modules:
            rows.append(Row(f"  {name}", [rank.module_ns(activity, name) for rank in ranks]))
        if activity is Activity.EXPOSED:
            rows.append(Row("  for a late rank", [step.waits_for_last_ns(rank) for step, rank in columns]))
    notable = [row for row in rows if max(row.times_ns) >= NOTABLE_NS]
    return [*notable, Row("a step", [rank.length_ns for rank in ranks])]


def last_rows_of(columns: Sequence[tuple[Step, RankStep]]) -> list[tuple[str, list[str]]]:
    """Below these: the hidden share of the communication, the buckets, the peak of memory and their share of it."""
    ranks = [rank for _, rank in columns]
    rows = [
        ("communication hidden", [f"{step.overlap(rank):.0%}" for step, rank in columns]),
        ("buckets", [f"{len(rank.plan.buckets)}, {size(rank.plan.nbytes)}" for rank in ranks]),
    ]
    if all(rank.peak_bytes for rank in ranks):
        peaks = [f"{size(rank.peak_bytes)} ({rank.plan.nbytes / rank.peak_bytes:.0%})" for rank in ranks]
        rows.append(("peak memory (share of buckets)", peaks))
    return rows
