from __future__ import annotations

import json
from dataclasses import replace

import pytest

from minddp.core.events import EventKind
from minddp.core.plan import plan_from_registration
from minddp.tools.xray.host import HostWait
from minddp.tools.xray.recording import ClockOffset, Layout, Recording
from tests.tools.xray.made_up import Rank, layout, recording

PLAN = layout([[1, 2], [3]])


def test_a_recording_survives_json() -> None:
    made = recording([Rank(), Rank(late_ms=1)], PLAN, steps=2)
    ranks = (replace(made.ranks[0], host_waits=(HostWait("here", 1, 2),)), *made.ranks[1:])
    made = replace(made, ranks=ranks, notes=("a note",), has_plan=False)
    assert Recording.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of format 99, but this minddp reads format \d+; record it again"):
        Recording.from_dict({**recording([Rank()], PLAN).to_dict(), "format": 99})


def test_all_times_move_with_the_clock() -> None:
    rank = recording([Rank()], PLAN).ranks[0]
    layouts = (*rank.layouts, Layout(PLAN, 50))
    moved = replace(rank, layouts=layouts, clock=ClockOffset(-7, 3)).on_the_clock_of_the_first_rank()
    assert [after.t_ns - before.t_ns for before, after in zip(rank.events, moved.events, strict=True)] == [
        -7
    ] * len(rank.events)
    assert moved.layouts[1].since_ns == 43
    assert moved.stopped_ns == rank.stopped_ns - 7
    assert moved.clock == ClockOffset(0, 3)


@pytest.mark.parametrize(
    ("errors", "together"), [([0], 0), ([0, 5, 3], 5), ([0, None], None), ([None], 0)], ids=str
)
def test_the_clock_error_of_a_recording_is_the_largest_one(errors: list[int | None], together: int | None) -> None:
    made = recording([Rank()] * len(errors), PLAN)
    ranks = tuple(replace(r, clock=ClockOffset(0, error)) for r, error in zip(made.ranks, errors, strict=True))
    assert replace(made, ranks=ranks).clock_error_ns == together


def test_a_layout_is_valid_from_its_time_on() -> None:
    early, late = PLAN, layout([[1], [2, 3]])
    rank = replace(recording([Rank()], PLAN).ranks[0], layouts=(Layout(early), Layout(late, 100)))
    assert [rank.plan_at(t) for t in (-5, 0, 99, 100)] == [early, early, early, late]


def test_a_plan_that_the_planner_made_survives_json_but_for_its_capacities() -> None:
    plan = plan_from_registration(PLAN.params, [2**20])
    made = recording([Rank()], plan)
    (found, since_ns, _), *_ = Recording.from_dict(json.loads(json.dumps(made.to_dict()))).ranks[0].layouts
    assert [found.names(b) for b in range(len(found.buckets))] == [plan.names(b) for b in range(len(plan.buckets))]
    assert (found.params, found.nbytes, found.origin, since_ns) == (plan.params, plan.nbytes, plan.origin, 0)


def test_every_kind_of_event_has_its_own_name() -> None:
    assert len({kind.value for kind in EventKind}) == len(EventKind)
