"""The trace events that a saved file holds."""

from __future__ import annotations

from collections import Counter

from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.chrome_trace import Json, trace_events
from tests.tools.xray.made_up import MIB, SLOW, Rank, layout, recording

PLAN = layout([[1, 1], [0.5, 1, 0.5], [2]], names=[f"blocks.{i}.weight" for i in range(6)])
STEPS, BUCKETS, PARAMS = 3, len(PLAN.buckets), len(PLAN.params)
MADE = recording([Rank(pack_ms=0.1), Rank(pack_ms=0.1, late_ms=3)], PLAN, steps=STEPS, wire=SLOW, title="three")


def events(*, ph: str = "XibeM") -> list[Json]:
    return [event for event in trace_events(Analysis(MADE)) if event["ph"] in ph]


def slices(pid: int) -> list[Json]:
    """Those of one rank in the order in which a reader of the file opens them: by time, then by place."""
    return sorted((event for event in events(ph="X") if event["pid"] == pid), key=lambda event: event["ts"])


def test_ranks_are_processes() -> None:
    assert [event["args"]["name"] for event in events(ph="M")] == ["rank 0", "computes", "rank 1", "computes"]
    assert {event["pid"] for event in events(ph="X")} == {1, 2}


def test_times_begin_with_the_first_step_on_one_clock() -> None:
    first, second = (slices(pid)[0] for pid in (1, 2))
    assert (first["name"], first["ts"], first["dur"]) == ("forward", 0, 10_000)
    assert (second["name"], second["ts"]) == ("forward", 3_000)
    assert {event["ts"] >= 0 for event in events(ph="Xibe")} == {True}


def test_slices_nest() -> None:
    for pid in (1, 2):
        open_until = [float("inf")]
        for one in slices(pid):
            while open_until[-1] <= one["ts"]:
                open_until.pop()
            assert one["ts"] + one["dur"] <= open_until[-1] + 1e-3
            open_until.append(one["ts"] + one["dur"])
    packs = [one for one in events(ph="X") if one["name"] == "pack"]
    assert len(packs) == 2 * STEPS * BUCKETS


def test_each_bucket_has_a_row_on_which_what_begins_also_ends() -> None:
    open_by_row: dict[tuple[int, str], list[str]] = {}
    rows: Counter[str] = Counter()
    for event in sorted(events(ph="be"), key=lambda event: event["ts"]):
        row = open_by_row.setdefault((event["pid"], event["id2"]["local"]), [])
        if event["ph"] == "b":
            rows[event["name"]] += 1
            assert bool(row) != event["name"].startswith("bucket"), "a delay lies in its bucket"
            row.append(event["name"])
        else:
            assert row.pop() == event["name"]
    assert len(open_by_row) == 2 * BUCKETS
    assert not any(open_by_row.values())
    assert [rows[f"bucket {index}"] for index in range(BUCKETS)] == [2 * STEPS] * BUCKETS
    assert rows["queues"]
    assert rows["waits for ranks"]
    assert rows["on the wire"] == 2 * STEPS * BUCKETS
    assert next(one["args"] for one in events(ph="b") if one["name"] == "bucket 1") == {
        "step": 0,
        "bytes": 2 * MIB,
        "parameters": [f"blocks.{i}.weight" for i in (2, 3, 4)],
    }


def test_each_gradient_is_an_instant() -> None:
    instants = Counter(event["name"] for event in events(ph="i"))
    assert instants == dict.fromkeys((f"blocks.{i}.weight" for i in range(PARAMS)), 2 * STEPS)
