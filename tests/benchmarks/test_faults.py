"""What killed processes have cost, from the events of a training that is written down here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import faults
from benchmarks.faults import Event, Events, outcome


def event(kind: str, time: float, step: int = 0, place: int = 0, **facts: Any) -> Event:
    return {"event": kind, "time": time, "step": step, "place": place, **facts}


def step_of_two(step: int, time: float, *places: int) -> list[Event]:
    """Processes 0 and 1 have four shares each."""
    begun = [event("begin", time, step, place) for place in places]
    shares = {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}
    return begun + [event("step", time + 0.5, step, place, dealt={str(place): shares[place]}) for place in places]


def end(digest: str) -> Event:
    return event("end", 100.0, digest=digest)


CALM = [*step_of_two(0, 0.0, 0, 1), *step_of_two(1, 1.0, 0, 1), *step_of_two(2, 2.0, 0, 1), end("a")]


def test_a_step_that_is_computed_again_replaces_what_it_was() -> None:
    again = [*step_of_two(0, 0.0, 0, 1), *step_of_two(1, 1.0, 0, 1), *step_of_two(1, 5.0, 0, 1)]
    found = outcome([*again, *step_of_two(2, 6.0, 0, 1), end("a")], CALM, steps=3)
    assert found == {
        "calm_s": 2.5,
        "disturbed_s": 6.5,
        "longest_s": 4.0,
        "steps_again": 1,
        "samples_lost": 0,
        "samples_twice": 0,
        "same_bits": "yes",
    }


def test_shares_of_a_process_that_is_away_are_lost() -> None:
    found = outcome(
        [*step_of_two(0, 0.0, 0, 1), *step_of_two(1, 1.0, 0), *step_of_two(2, 2.0, 0, 1), end("b")], CALM, 3
    )
    assert (found["samples_lost"], found["samples_twice"]) == (4 * faults.SAMPLES, 0)
    assert found["same_bits"] == "no"


def test_a_share_that_two_processes_have_computed_counts_twice() -> None:
    both = event("step", 2.6, 2, 1, dealt={"1": [3, 4, 5, 6, 7]})
    found = outcome([*CALM[:-2], both, end("a")], CALM, steps=3)
    assert (found["samples_lost"], found["samples_twice"]) == (0, faults.SAMPLES)


def test_processes_that_end_with_different_bits_are_not_the_same() -> None:
    assert outcome([*CALM, end("b")], CALM, steps=3)["same_bits"] == "no"


def test_a_way_is_a_row_of_the_table() -> None:
    report = {"kills": [1, 2], "ways": {"one": outcome(CALM, CALM, 3)}}
    (table,) = faults.tables(report)
    assert table.rows == [["one", "2.5 s", "2.5 s", "1.0 s", "0", "0", "0", "yes"]]


def test_the_last_process_is_not_killed() -> None:
    with pytest.raises(ValueError, match="below world_size"):
        faults.Config(world_size=2, kills=2)


def test_events_are_read_once_and_whole(tmp_path: Path) -> None:
    events, written = Events(str(tmp_path)), tmp_path / "1.jsonl"
    written.write_text('{"event": "step", "pid": 1, "place": 0}\n{"event": "st')
    events.read()
    assert events.places() == {1: 0}
    with written.open("a") as report:
        report.write('ep", "pid": 1, "place": 2}\n')
    events.read()
    assert len(events.seen) == 2
    assert events.places() == {1: 2}
