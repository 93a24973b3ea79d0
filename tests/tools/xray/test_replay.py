"""The ideal wire of made-up recordings is the model, so playing one recording from another must be exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minddp.core.plan import BucketPlan, plan_from_groups
from minddp.tools.forecast.lateness import WorkPhase
from minddp.tools.forecast.link import Link
from minddp.tools.xray.reading import steps_of
from minddp.tools.xray.replay import FREE, Costs, busy, costs_of, replay
from minddp.tools.xray.timeline import Activity, Interval, RecordedStep
from tests.tools.xray.made_up import MIB, MS, Rank, Wire, layout, recording

WIRE = Wire(latency_ns=MS // 2, bytes_per_ms=MIB / 4)
LINK = Link(0.5e-3, MIB / 4 * 1e3)
COSTS = Costs(LINK, 1)


def regrouped(plan: BucketPlan, counts: list[int]) -> BucketPlan:
    """The same parameters in the same order, `counts[b]` of them in bucket b."""
    ends = list(accumulate(counts))
    return plan_from_groups(plan.params, [range(*ends) for ends in pairwise([0, *ends])], "by hand")


def made(ranks: Sequence[Rank], plan: BucketPlan, steps: int = 1, wire: Wire = WIRE) -> list[RecordedStep]:
    return list(steps_of(recording(ranks, plan, wire=wire, steps=steps, meet=False)))


def wires(step: RecordedStep) -> list[Interval]:
    """When the bytes of each bucket move, on the first rank."""
    found = [step.on_the_wire(bucket.index, step.ranks[0]) for bucket in step.ranks[0].buckets]
    return [wire for wire in found if wire is not None]


# ---------------------------------------------------------------------- what things cost


def test_the_wire_is_found_in_the_recording() -> None:
    found = costs_of(made([Rank(), Rank(late_ms=3)], layout([[1], [2], [0.5]])))
    assert found is not None
    assert found.wire.latency_s == pytest.approx(LINK.latency_s, rel=1e-3)
    assert found.wire.bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=1e-3)
    assert found.messages == 6
    assert found.wire.latency_s > 0


def test_packing_and_copying_are_found_too() -> None:
    found = costs_of(made([Rank(pack_ms=0.25, copy_ms=0.5)], layout([[1], [2]])))
    assert found is not None
    assert (found.pack.seconds(MIB), found.copy.seconds(2 * MIB)) == pytest.approx((0.25e-3, 0.5e-3), rel=0.01)


def steps_by(wires: list[Wire], sizes: list[list[float]]) -> list[RecordedStep]:
    """One step of one rank by each of these wires."""
    return [step for wire in wires for step in made([Rank()], layout(sizes), wire=wire)]


def test_one_outlier_of_many_does_not_matter() -> None:
    found = costs_of(steps_by([WIRE] * 4 + [Wire(latency_ns=900 * MS)], [[1], [2], [4]]))
    assert found is not None
    assert found.wire.bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=1e-3)


def test_messages_of_about_one_size_do_not_show_a_latency() -> None:
    found = costs_of(steps_by([Wire(ms * MS, 1e15) for ms in (250, 750, 500)], [[1]]))
    assert found is not None
    assert found.wire.latency_s == 0
    assert found.wire == Link(0.0, MIB / 0.5)
    near = costs_of(made([Rank()], layout([[1], [1.5]])))
    assert near is not None
    assert near.wire.latency_s == 0


def test_messages_take_as_long_in_all_as_they_did() -> None:
    """The first message of each backward is ten times as slow as the others: the median does not see it."""
    (step,) = made([Rank(backward_ms=1)], layout([[2]] + [[1]] * 6))
    (rank,) = step.ranks
    first = rank.buckets[0]
    late_ns = 30 * MS
    moved = [replace(b, completed_ns=(b.completed_ns or 0) + late_ns) for b in (first, *rank.buckets[1:])]
    step = replace(step, ranks=(replace(rank, buckets=tuple(moved)),))
    found = costs_of([step])
    assert found is not None
    in_all = sum(wire.length_ns for wire in wires(step))
    assert sum(found.wire.seconds(b.nbytes) for b in rank.buckets) == pytest.approx(in_all / 1e9)


def test_nothing_observed_is_nothing_fitted() -> None:
    assert costs_of([]) is None


# ---------------------------------------------------------------------- playing


@given(
    st.lists(st.floats(0.05, 2), min_size=1, max_size=8),
    st.data(),
    st.lists(st.floats(0, 20), min_size=1, max_size=3),
)
def test_a_step_as_played_is_what_it_would_have_been(
    sizes: list[float], data: st.DataObject, loss_ms: list[float]
) -> None:
    plan = layout([sizes])
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sizes) - 1)) if len(sizes) > 1 else st.just(set())))
    counts = [after - before for before, after in zip([0, *cuts], [*cuts, len(sizes)], strict=True)]
    other = regrouped(plan, counts)
    ranks = [Rank(loss_ms=ms, copy_ms=0) for ms in loss_ms]
    *_, truth = made(ranks, other, steps=3)
    again = replay(made(ranks, plan), COSTS, other)
    (played,) = again.steps
    assert again.step_ns == pytest.approx(truth.length_ns, abs=100)
    for found, true in zip(played.ranks, truth.ranks, strict=True):
        assert found.exposed_ns == pytest.approx(true.parts_ns[Activity.EXPOSED], abs=100)
        assert found.end_ns - found.begin_ns == pytest.approx(true.length_ns, abs=100)
    begin_ns = min(rank.begin_ns for rank in played.ranks)
    for wire, history in zip(played.wires, truth.ranks[0].buckets, strict=True):
        assert wire.end_ns - begin_ns == pytest.approx((history.completed_ns or 0) - truth.begin_ns, abs=100)


@pytest.mark.parametrize("ranks", [[Rank(forward_ms=14), Rank()], [Rank(), Rank(other_ms=9), Rank(optimizer_ms=4)]])
def test_a_recording_played_unchanged_is_itself(ranks: list[Rank]) -> None:
    steps = made([replace(rank, copy_ms=0) for rank in ranks], layout([[1, 1], [2]]), steps=4)
    again = replay(steps, COSTS)
    for played, recorded in zip(again.steps[1:], steps[1:], strict=True):
        for rank, true in zip(played.ranks, recorded.ranks, strict=True):
            assert rank.exposed_ns == pytest.approx(true.parts_ns[Activity.EXPOSED], abs=100)
            assert rank.end_ns - rank.begin_ns == pytest.approx(true.length_ns, abs=100)
            assert rank.complete_ns - rank.begin_ns == pytest.approx(
                (true.gradients_complete_ns or 0) - true.interval.begin_ns, abs=100
            )


@pytest.mark.parametrize(
    ("phase", "late"),
    [
        (WorkPhase.BETWEEN, Rank(other_ms=6)),
        (WorkPhase.FORWARD, Rank(forward_ms=15)),
        (WorkPhase.LOSS, Rank(loss_ms=6)),
        (WorkPhase.BACKWARD, Rank(backward_ms=25)),
        (WorkPhase.OPTIMIZER, Rank(optimizer_ms=7)),
    ],
)
def test_a_rank_that_is_quicker_makes_the_step_shorter_by_as_much(phase: WorkPhase, late: Rank) -> None:
    steps, costs = (
        made([Rank(), late], layout([[1, 1], [2]]), steps=4, wire=Wire(0, 1e12)),
        replace(COSTS, wire=FREE),
    )
    usual_ns, late_ns = (sum(span.length_ns for span, of in busy(rank) if of is phase) for rank in steps[1].ranks)
    assert late_ns - usual_ns == pytest.approx(5 * MS, abs=10)
    factors = {(t, 1, phase): usual_ns / late_ns for t in range(4)}
    gain_ns = replay(steps, costs).step_ns - replay(steps, costs, factors=factors).step_ns
    assert gain_ns == pytest.approx(5 * MS, abs=1000)


def test_gradients_are_ready_at_their_places_in_a_backward_that_is_quicker() -> None:
    slow, quick = (made([Rank(backward_ms=ms)], layout([[2], [2]])) for ms in (20, 10))
    played = replay(slow, COSTS, factors={(0, 0, WorkPhase.BACKWARD): 0.5}).steps[0].ranks[0]
    expected = [t_ns - quick[0].begin_ns for t_ns in quick[0].ranks[0].ready_ns.values()]
    found = [t_ns - played.begin_ns for t_ns in played.launches_ns]  # of a bucket for each gradient
    assert found == pytest.approx(expected, abs=10)


def test_one_step_counts_as_if_it_followed_itself() -> None:
    steps = made([Rank(), Rank(loss_ms=6)], layout([[1, 1], [2]]))
    long = made([Rank(), Rank(loss_ms=6)], layout([[1, 1], [2]]), steps=5)
    assert replay(steps, COSTS).step_ns == pytest.approx(replay(long, COSTS).step_ns, abs=1000)


def test_buffers_are_waited_for_as_long_as_rank_0_is_late() -> None:
    """Rank 1 waits 6 ms in its forward: 4 for rank 0, 2 for the buffers."""
    (step,) = made([Rank(forward_ms=14, copy_ms=0), Rank(copy_ms=0)], layout([[1]]))
    spans = []
    for rank, begin_ns, end_ns in zip(step.ranks, (4 * MS, 0), (5 * MS, 6 * MS), strict=True):
        first, *rest = rank.spans
        cut = [
            replace(first, end_ns=begin_ns),
            replace(first, activity=Activity.BUFFERS, begin_ns=begin_ns, end_ns=end_ns),
        ]
        spans.append((*(span for span in cut if span.length_ns), replace(first, begin_ns=end_ns), *rest))
    ranks = [replace(rank, spans=tuple(its)) for rank, its in zip(step.ranks, spans, strict=True)]
    step = replace(step, ranks=tuple(ranks))
    (played,) = replay([step], COSTS).steps
    (quicker,) = replay([step], COSTS, factors={(0, 0, WorkPhase.FORWARD): 0.0}).steps
    rest_ms = 1 + 20  # loss and backward
    for simulated, forwards_ms in ((played, [14, 10]), (quicker, [1, 2 + 4])):
        computed = [rank.complete_ns - rank.begin_ns for rank in simulated.ranks]
        assert computed == pytest.approx([(forward + rest_ms) * MS for forward in forwards_ms], abs=100)


def test_buckets_are_launched_in_the_order_of_the_plan() -> None:
    plan = layout([[1], [1]])
    steps = made([Rank()], plan)
    backwards = plan_from_groups(plan.params, [[1], [0]], "by hand")
    (played,) = replay(steps, COSTS, backwards).steps
    (rank,), (first, second) = played
    last_launch_ns = steps[0].ranks[0].buckets[1].launched_ns or 0
    assert first.begin_ns - rank.begin_ns == pytest.approx(last_launch_ns - steps[0].begin_ns, abs=100)
    assert second.begin_ns == first.end_ns
    assert rank.launches_ns == sorted(rank.launches_ns)


def test_copying_back_overlaps_with_what_is_still_on_the_wire() -> None:
    steps = made([Rank(copy_ms=0.5)], layout([[1], [1], [1], [1]]), steps=2)
    again = replay(steps, replace(COSTS, copy=Link(0.5e-3, float("inf"))))
    assert again.step_ns == pytest.approx(steps[0].length_ns, abs=100)


def test_more_buckets_take_time_of_backward() -> None:
    plan = layout([[1] * 4])
    (step,) = made([Rank(copy_ms=0)], plan)
    steps = [replace(step, ranks=(replace(step.ranks[0], launch_ns=1 * MS, crowded_ns=2 * MS),))]
    costs = replace(COSTS, wire=FREE, pack=Link(0.5e-3, float("inf")))
    others = regrouped(plan, [1, 1, 1, 1])
    assert replay(steps, costs, others).step_ns - replay(steps, costs).step_ns == pytest.approx(4.5 * MS, abs=100)
    latency = replace(costs, wire=Link(1e-9, float("inf")))  # four messages crowd backward four times as much
    assert replay(steps, latency, others).step_ns - replay(steps, latency).step_ns == pytest.approx(
        10.5 * MS, abs=100
    )


def test_a_bucket_none_of_which_came_leaves_when_backward_ends() -> None:
    (step,) = made([Rank(), Rank()], layout([[1], [1]]))
    rank = step.ranks[1]
    step = replace(step, ranks=(step.ranks[0], replace(rank, ready_ns={0: rank.ready_ns[0]})))
    (played,) = replay([step], replace(COSTS, wire=Link(0.0, 1e12))).steps
    begins = [wire.begin_ns - played.ranks[0].begin_ns for wire in played.wires]
    assert begins == pytest.approx([21 * MS, 31 * MS], abs=1000)


def test_in_shared_memory_the_bytes_move_when_all_ranks_wait() -> None:
    plan = layout([[1], [1]])
    steps = [replace(step, adds_after_ns=10**12) for step in made([Rank(), Rank(loss_ms=4)], plan)]
    (played,) = replay(steps, COSTS).steps
    first, second = played.wires
    assert first.begin_ns == played.ranks[1].complete_ns
    assert second.begin_ns == first.end_ns
    (soon,) = replay([replace(step, adds_after_ns=1 * MS) for step in steps], COSTS).steps
    assert soon.wires[0].begin_ns == pytest.approx(soon.ranks[1].launches_ns[0] + 1 * MS, abs=100)
