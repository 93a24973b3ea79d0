"""What killed processes have cost, from the events of a training that is written down here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import faults
from benchmarks.faults import Event, events_of, outcome


def event(kind: str, time: float, step: int = 0, place: int = 0, **facts: Any) -> Event:
    return {"event": kind, "time": time, "step": step, "place": place, **facts}


def step_of_two(step: int, time: float) -> list[Event]:
    places = (0, 1)
    begun = [event("begin", time, step, place) for place in places]
    return begun + [event("step", time + 0.5, step, place) for place in places]


def end(digest: str) -> Event:
    return event("end", 100.0, digest=digest)


CALM = [*step_of_two(0, 0.0), *step_of_two(1, 1.0), *step_of_two(2, 2.0), end("a")]


def test_the_cost_is_the_time_to_the_last_step_and_the_longest_pause() -> None:
    again = [*step_of_two(0, 0.0), *step_of_two(1, 1.0), *step_of_two(1, 5.0), *step_of_two(2, 6.0), end("a")]
    found = outcome(again, CALM)
    assert found == {"calm_s": 2.5, "disturbed_s": 6.5, "longest_s": 4.0, "same_bits": "yes"}
    (table,) = faults.tables({"kills": [1], "ways": {"one": found}})
    assert table.rows == [["one", "2.5 s", "6.5 s", "4.0 s", "yes"]]


def test_processes_that_end_with_different_bits_are_not_the_same() -> None:
    assert outcome([*CALM, end("b")], CALM)["same_bits"] == "no"


def test_the_last_process_is_not_killed() -> None:
    with pytest.raises(ValueError, match="below world_size"):
        faults.Config(world_size=2, kills=2)


def test_only_whole_lines_are_events(tmp_path: Path) -> None:
    lines = '{"event": "step", "time": 2}\n{"event": "begin", "time": 1}\n{"event": "st'
    (tmp_path / "1.jsonl").write_text(lines)
    assert [event["event"] for event in events_of(str(tmp_path))] == ["begin", "step"]
