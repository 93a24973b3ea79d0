from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minddp.core.events import EventKind as K
from minddp.core.plan import BucketPlan
from minddp.tools.forecast.link import Link
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.reading import steps_of, steps_of_rank
from minddp.tools.xray.recording import RankRecording, Recording, Stamped
from minddp.tools.xray.timeline import Activity, Interval, Passage
from tests.tools.xray.made_up import MIB, MS, Rank, layout, recording

PLAN = layout([[1, 1], [2]])  # two buckets of 2 MiB, three gradients


def alone(events: list[tuple[int, K] | tuple[int, K, int]], plan: BucketPlan = PLAN) -> RankRecording:
    """One rank that has seen these events; times in milliseconds."""
    stamped = tuple(Stamped(t * MS, *rest) for t, *rest in events)
    first = recording([Rank()], plan).ranks[0]
    return replace(first, events=stamped, stopped_ns=stamped[-1].t_ns, world_size=1)


def one_rank(made: Recording, *events: Stamped, without: tuple[K, ...] = (), after_ns: int = 0) -> RankRecording:
    """Its first rank, but for some kinds of events, and with `events` after the others, up to `after_ns` later."""
    rank = made.ranks[0]
    kept = tuple(event for event in rank.events if event.kind not in without)
    return replace(rank, events=(*kept, *events), stopped_ns=rank.stopped_ns + after_ns, world_size=1)


def milliseconds(parts_ns: dict[Activity, int]) -> dict[str, float]:
    return {activity.value: ns / MS for activity, ns in parts_ns.items() if ns}


def test_a_step_is_the_sum_of_its_parts_and_buckets_have_a_history() -> None:
    # 2 MiB take 1 + 2 ms. Bucket 0 leaves at 10 + 1 + 2/3 of 21 = 25, bucket 1 at 32 with the end of backward.
    (step,) = steps_of(recording([Rank(backward_ms=21)], PLAN))
    (rank,) = step.ranks
    assert milliseconds(rank.parts_ns) == {
        "forward": 10,
        "between forward and backward": 1,
        "backward": 21,
        "blocked in communication": 2.5,  # 32 to 35, less the half that copies bucket 0
        "copy averages to .grad": 1,
        "optimizer": 2,
        "other": 1,
    }
    assert step.length_ns == sum(rank.parts_ns.values()) == 38.5 * MS
    first, second = rank.buckets
    assert first.last_param == 1
    assert [t and t / MS for t in (first.launched_ns, first.completed_ns, first.waited_ns)] == [25, 28, 32]
    assert (first.awaited_ns, second.awaited_ns) == (0, 2.5 * MS)
    assert step.on_the_wire(0, rank) == Interval(25 * MS, 28 * MS)
    assert step.on_the_wire(1, rank) == Interval(32 * MS, 35 * MS)
    assert step.overlap(rank) == pytest.approx(1 - 2.5 / 6)


def test_the_first_rank_can_be_the_last_to_launch() -> None:
    """Over shared memory it joins when it waits, or some time after its launch."""
    made = recording([Rank(late_ms=5), Rank()], PLAN)
    (step,) = steps_of(made)
    launched_ns, complete_ns = step.ranks[0].buckets[0].launched_ns, step.ranks[0].gradients_complete_ns
    for adds_after_ns, join_ns in {0: launched_ns, 1 * MS: launched_ns + 1 * MS, 10**12: complete_ns}.items():
        ranks = tuple(replace(rank, adds_after_ns=adds_after_ns) for rank in made.ranks)
        (step,) = steps_of(replace(made, ranks=ranks))
        assert step.last_join(0) == (join_ns, 0)


def test_the_last_rank_to_launch_is_unknown_unless_all_ranks_were_recorded() -> None:
    both = recording([Rank(), Rank(late_ms=5)], PLAN)
    (step,) = steps_of(replace(both, ranks=both.ranks[:1]))
    assert step.last_join(0) is None
    assert step.on_the_wire(0, step.ranks[0]).begin_ns == step.ranks[0].buckets[0].launched_ns


def test_a_bucket_queues_then_waits_for_ranks_then_moves() -> None:
    """The passage of a bucket: while the wire is busy it queues, although rank 1 has not launched it either."""
    (step,) = steps_of(recording([Rank(), Rank(late_ms=4)], PLAN, wire=Link(1e-3, 500 * MIB)))
    early, late = step.ranks
    through_ns, now = early.buckets[0].completed_ns, step.passage(1, early)
    launched_ns, later_ns = (rank.buckets[1].launched_ns for rank in step.ranks)
    assert launched_ns < through_ns < later_ns
    assert now == Passage(
        queues=Interval(launched_ns, through_ns),
        waits_for_ranks=Interval(through_ns, later_ns),
        wire=Interval(later_ns, later_ns + 5 * MS),
    )
    of_late = step.passage(1, late)
    assert (of_late.queues.length_ns, of_late.waits_for_ranks.length_ns, of_late.wire) == (0, 0, now.wire)


def test_steps_are_cut_at_the_forward_after_a_synchronised_backward() -> None:
    steps = steps_of(recording([Rank(), Rank(late_ms=1)], PLAN, steps=3))
    assert [step.number for step in steps] == [0, 1, 2]
    assert len({step.length_ns for step in steps}) == 1
    for before, after in pairwise(steps):
        assert before.ranks[0].interval.end_ns == after.ranks[0].interval.begin_ns


def test_what_comes_before_the_first_forward_belongs_to_no_step() -> None:
    first = recording([Rank()], PLAN, steps=2).ranks[0]
    begin = [event.kind for event in first.events].index(K.BACKWARD_BEGIN)
    (step,) = steps_of_rank(replace(first, events=first.events[begin:]))
    assert step.spans[0].activity is Activity.FORWARD


def test_accumulation_makes_one_step_of_several_forwards() -> None:
    local = [
        (0, K.FORWARD_BEGIN),
        (4, K.NO_SYNC),
        (4, K.FORWARD_END),
        (6, K.GRADIENT_KEPT, 2),
        (9, K.GRADIENT_KEPT, 0),
    ]
    synchronised = [(12, K.FORWARD_BEGIN), (16, K.FORWARD_END), (17, K.BACKWARD_BEGIN), (20, K.PARAM_READY, 0)]
    end = [(22, K.GRADIENTS_COMPLETE), (23, K.BACKWARD_END), (25, K.OPTIMIZER_BEGIN), (26, K.OPTIMIZER_END)]
    (step,) = steps_of_rank(alone([*local, *synchronised, *end]))
    assert [(span.activity.value, span.begin_ns / MS, span.end_ns / MS) for span in step.spans] == [
        ("forward", 0, 4),
        ("between forward and backward", 4, 6),
        ("backward", 6, 9),  # a local backward has no event at its end: it lasts to its last gradient
        ("other", 9, 12),
        ("forward", 12, 16),
        ("between forward and backward", 16, 17),
        ("backward", 17, 22),
        ("blocked in communication", 22, 23),
        ("other", 23, 25),
        ("optimizer", 25, 26),
    ]


def test_parts_of_forward_are_distinguished() -> None:
    forward = [(0, K.FORWARD_BEGIN), (4, K.BUFFERS_BEGIN)]
    rest = [(6, K.BUFFERS_BROADCAST, 1), (9, K.FORWARD_END), (10, K.BACKWARD_BEGIN), (12, K.GRADIENTS_COMPLETE)]
    (step,) = steps_of_rank(alone([*forward, *rest, (12, K.BACKWARD_END), (13, K.OPTIMIZER_END)]))
    assert milliseconds(step.parts_ns) == {
        "forward": 4 + 3,
        "buffers": 2,
        "between forward and backward": 1,
        "backward": 2,
        "other": 1,
    }


def test_steps_before_the_last_rebuild_are_left_out() -> None:
    made = recording([Rank()], PLAN, steps=3).ranks[0]
    begins = [event.t_ns for event in made.events if event.kind is K.FORWARD_BEGIN]
    rebuilt = Stamped(begins[1] + 1, K.BUCKETS_REBUILT, 2)
    events = sorted([*made.events, rebuilt], key=lambda event: event.t_ns)
    assert [step.number for step in steps_of_rank(replace(made, events=tuple(events)))] == [1, 2]


def test_an_error_discards_its_step() -> None:
    """Also where the next forward finds it."""
    whole = recording([Rank()], PLAN).ranks[0]
    cut = [event for event in whole.events if event.t_ns <= 20 * MS]
    again = [Stamped(event.t_ns + 40 * MS, *event[1:]) for event in whole.events]
    at_once, found = Stamped(21 * MS, K.ERROR), (Stamped(30 * MS, K.FORWARD_BEGIN), Stamped(31 * MS, K.ERROR))
    assert steps_of_rank(replace(whole, events=(*cut, at_once), stopped_ns=21 * MS)) == []
    for error in ([at_once], found):
        (step,) = steps_of_rank(replace(whole, events=(*cut, *error, *again), stopped_ns=80 * MS))
        assert step.interval.begin_ns == again[0].t_ns
        assert step.buckets[0].launched_ns == steps_of_rank(whole)[0].buckets[0].launched_ns + 40 * MS


def test_the_typical_step_is_the_median() -> None:
    steps = [steps_of(recording([Rank(forward_ms=ms)], PLAN))[0] for ms in (50, 20, 24, 22)]
    analysis = Analysis(recording([Rank()], PLAN))
    vars(analysis)["steps"] = tuple(steps)
    assert analysis.typical is steps[3]


def test_an_evaluation_after_the_last_step_is_no_step() -> None:
    made = recording([Rank()], PLAN)
    end_ns = made.ranks[0].stopped_ns
    after = Stamped(end_ns + 1, K.FORWARD_BEGIN), Stamped(end_ns + MS, K.FORWARD_END)
    assert len(steps_of_rank(one_rank(made, *after, after_ns=MS))) == 1


def test_without_events_for_waits_buckets_are_waited_for_in_order() -> None:
    made = recording([Rank(copy_ms=0)], PLAN)
    (whole,) = steps_of_rank(one_rank(made))
    (seen,) = steps_of_rank(one_rank(made, without=(K.BUCKET_WAITED, K.BUCKET_UNPACKED)))
    assert seen.parts_ns == whole.parts_ns
    assert [bucket.awaited_ns for bucket in seen.buckets] == [bucket.awaited_ns for bucket in whole.buckets]


def test_a_completion_without_an_event_is_not_later_than_the_wait() -> None:
    (step,) = steps_of_rank(one_rank(recording([Rank()], PLAN), without=(K.BUCKET_COMPLETED,)))
    assert not step.buckets[0].completion_was_seen
    assert step.buckets[0].completed_ns == step.buckets[0].waited_ns


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(list(K)), st.integers(-1, 2)), max_size=40))
def test_spans_tile_the_steps_whatever_the_events(drawn: list[tuple[int, K, int]]) -> None:
    """Also for nonsense: events that were dropped or came in any order."""
    now, events = 0, []
    for gap, kind, subject in drawn:
        now += gap
        events.append(Stamped(now, kind, subject))
    first = recording([Rank()], PLAN).ranks[0]
    for step in steps_of_rank(replace(first, events=tuple(events), stopped_ns=now)):
        ends = [step.interval.begin_ns, *(span.end_ns for span in step.spans)]
        assert [span.begin_ns for span in step.spans] == ends[:-1]
        assert ends[-1] == step.interval.end_ns


def test_collectives_after_a_backward_belong_to_no_bucket_of_it() -> None:
    """A rank that has run out of inputs shadows the others' backwards; see `join.py`."""
    made = recording([Rank()], PLAN)
    end_ns = made.ranks[0].stopped_ns
    shadows = Stamped(end_ns + 1, K.BUCKET_LAUNCHED, 0), Stamped(end_ns + 2, K.BUCKET_COMPLETED, 0)
    (step,) = steps_of_rank(one_rank(made, *shadows, after_ns=3))
    assert step.buckets == steps_of_rank(one_rank(made))[0].buckets


# ---------------------------------------------------------------------- times in which a rank is blocked


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=3, max_size=3))
def test_the_wire_is_never_used_twice_whenever_buckets_leave_and_arrive(drawn: list[tuple[int, int]]) -> None:
    """So the shares of buckets add up: `overlap` only sums."""
    made = steps_of(recording([Rank()], layout([[1], [1], [1]])))[0]
    times = [(min(pair), max(pair)) for pair in drawn]
    rank = replace(
        made.ranks[0],
        buckets=tuple(
            replace(bucket, launched_ns=launched * MS, completed_ns=completed * MS)
            for bucket, (launched, completed) in zip(made.ranks[0].buckets, times, strict=True)
        ),
    )
    step = replace(made, ranks=(rank,))
    wires = sorted(step.on_the_wire(bucket, rank) for bucket in range(3))
    assert all(before.end_ns <= after.begin_ns for before, after in pairwise(w for w in wires if w.length_ns))
    exposed = rank.exposed(wires)
    assert exposed == sorted(exposed)
    still = [span for span in rank.spans if span.activity is Activity.EXPOSED]
    for t in range(0, 60 * MS, MS // 2):
        is_exposed = any(w[0] <= t < w[1] for w in wires) and any(s.begin_ns <= t < s.end_ns for s in still)
        assert is_exposed == any(part.begin_ns <= t < part.end_ns for part in exposed)
    assert 0 <= step.overlap(rank) <= 1
