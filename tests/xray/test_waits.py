from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from minddp.core.events import EventKind as K
from minddp.xray.reading import steps_of
from minddp.xray.recording import Stamped
from minddp.xray.timeline import Activity
from minddp.xray.waits import Cause, total_by_cause, waits_of, worst_wait
from tests.xray.made_up import MIB, MS, Rank, Wire, layout, recording

PLAN = layout([[1, 1], [2]])


def causes_ms(step_rank: dict[Cause, int]) -> dict[str, float]:
    return {cause.name: ns / MS for cause, ns in step_rank.items() if ns}


def test_a_rank_that_is_early_waits_for_the_other_one() -> None:
    (step,) = steps_of(recording([Rank(), Rank(late_ms=8)], layout([[1, 1]])))
    early, late = step.ranks
    assert causes_ms(total_by_cause(step, early)) == {"OTHER_RANK": 8, "WIRE": 3}
    assert causes_ms(total_by_cause(step, late)) == {"WIRE": 3}


def test_a_slow_wire_is_waited_for_bucket_by_bucket() -> None:
    (step,) = steps_of(recording([Rank(copy_ms=0)], PLAN, wire=Wire(bytes_per_ms=MIB / 10)))
    waits = waits_of(step, step.ranks[0])
    assert [wait.bucket for wait in waits] == [0, 1]
    assert [{cause for cause, ns in wait.ns_by_cause.items() if ns} for wait in waits] == [{Cause.WIRE}] * 2
    assert worst_wait(step) == max(waits, key=lambda wait: wait.length_ns)


def test_time_after_a_bucket_has_arrived_has_its_own_cause() -> None:
    made = recording([Rank(copy_ms=0)], PLAN)
    late = tuple(
        Stamped(t + 4 * MS if kind in (K.BUCKET_WAITED, K.BUCKET_UNPACKED) and subject == 1 else t, kind, subject)
        for t, kind, subject in made.ranks[0].events
        if kind not in (K.BACKWARD_END, K.OPTIMIZER_BEGIN, K.OPTIMIZER_END)
    )
    end = Stamped(late[-1].t_ns, K.BACKWARD_END)
    rank = replace(made.ranks[0], events=(*late, end), stopped_ns=end.t_ns)
    (step,) = steps_of(replace(made, ranks=(rank,)))
    assert causes_ms(total_by_cause(step, step.ranks[0])) == {"WIRE": 3, "WAKING": 4}


def test_no_rank_waits_in_a_step_whose_communication_is_hidden() -> None:
    (step,) = steps_of(recording([Rank()], layout([[1]]), wire=Wire(latency_ns=0, bytes_per_ms=1e15)))
    assert worst_wait(step) is None


@given(
    st.lists(st.floats(0, 30), min_size=1, max_size=3),
    st.floats(0.05, 10),
    st.lists(st.lists(st.floats(0.1, 3), min_size=1, max_size=3), min_size=1, max_size=4),
)
def test_causes_add_up_to_the_waiting(late_ms: list[float], mib_per_ms: float, sizes: list[list[float]]) -> None:
    ranks = [Rank(late_ms=late) for late in late_ms]
    (step,) = steps_of(recording(ranks, layout(sizes), wire=Wire(bytes_per_ms=mib_per_ms * MIB)))
    for rank in step.ranks:
        assert sum(total_by_cause(step, rank).values()) == rank.parts_ns[Activity.EXPOSED]
