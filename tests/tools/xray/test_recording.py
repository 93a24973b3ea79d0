from __future__ import annotations

import json
from dataclasses import replace

import pytest

from minddp.core.events import EventKind
from minddp.core.plan import plan_from_registration
from minddp.tools.xray.recording import Recording
from tests.tools.xray.made_up import Rank, layout, recording

PLAN = layout([[1, 2], [3]])


def test_a_recording_survives_json() -> None:
    made = recording([Rank(), Rank(late_ms=1)], PLAN, steps=2)
    made = replace(made, notes=("a note",), has_plan=False)
    assert Recording.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of format 99, but this minddp reads format \d+; record it again"):
        Recording.from_dict({**recording([Rank()], PLAN).to_dict(), "format": 99})


def test_a_plan_that_the_planner_made_survives_json_but_for_its_capacities() -> None:
    plan = plan_from_registration(PLAN.params, [2**20])
    made = recording([Rank()], plan)
    found = Recording.from_dict(json.loads(json.dumps(made.to_dict()))).ranks[0].plan
    assert [found.names(b) for b in range(len(found.buckets))] == [plan.names(b) for b in range(len(plan.buckets))]
    assert (found.params, found.nbytes, found.origin) == (plan.params, plan.nbytes, plan.origin)


def test_every_kind_of_event_has_its_own_name() -> None:
    assert len({kind.value for kind in EventKind}) == len(EventKind)
