from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minddp.core.plan import BucketPlan, plan_from_groups
from minddp.forecast.link import Link
from minddp.xray.reading import steps_of
from minddp.xray.timeline import Activity, Interval, Step
from minddp.xray.what_if import alternatives, fit, predict, ready_order, with_other_ranks
from tests.xray.made_up import MIB, MS, Rank, Wire, layout, recording

WIRE = Wire(latency_ns=MS // 2, bytes_per_ms=MIB / 4)
LINK = Link(0.5e-3, MIB / 4 * 1e3)


def regrouped(plan: BucketPlan, counts: list[int]) -> BucketPlan:
    """The same parameters in the same order, `counts[b]` of them in bucket b."""
    ends = list(accumulate(counts))
    return plan_from_groups(plan.params, [range(*ends) for ends in pairwise([0, *ends])], "by hand")


def wires(predicted: Step) -> list[Interval]:
    """When the bytes of each bucket move, on the first rank."""
    found = [predicted.on_the_wire(bucket.index, predicted.ranks[0]) for bucket in predicted.ranks[0].buckets]
    return [wire for wire in found if wire is not None]


def test_the_wire_is_found_in_the_recording() -> None:
    found = fit(steps_of(recording([Rank(), Rank(late_ms=3)], layout([[1], [2], [0.5]]), wire=WIRE)))
    assert found is not None
    assert found.link.latency_s == pytest.approx(LINK.latency_s, rel=1e-3)
    assert found.link.bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=1e-3)
    assert (found.messages, found.separates_latency) == (6, True)


def steps_by(wires: list[Wire], sizes: list[list[float]]) -> list[Step]:
    """One step of one rank by each of these wires."""
    return [step for wire in wires for step in steps_of(recording([Rank()], layout(sizes), wire=wire))]


def test_one_outlier_of_many_does_not_matter() -> None:
    found = fit(steps_by([WIRE] * 4 + [Wire(latency_ns=900 * MS)], [[1], [2], [4]]))
    assert found is not None
    assert found.link.bytes_per_s == pytest.approx(LINK.bytes_per_s)


def test_messages_of_one_size_do_not_show_a_latency() -> None:
    found = fit(steps_by([Wire(ms * MS, 1e15) for ms in (250, 750, 500)], [[1]]))
    assert found is not None
    assert not found.separates_latency
    assert found.link == Link(0.0, MIB / 0.5)


def test_nothing_observed_is_nothing_fitted() -> None:
    assert fit([]) is None


@given(
    st.lists(st.floats(0.05, 2), min_size=1, max_size=8),
    st.data(),
    st.lists(st.floats(0, 20), min_size=1, max_size=3),
)
def test_a_prediction_is_what_the_step_would_have_been(
    sizes: list[float], data: st.DataObject, late_ms: list[float]
) -> None:
    """The ideal wire of made-up recordings is the model, so predicting one from another must be exact."""
    plan = layout([sizes])
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sizes) - 1)) if len(sizes) > 1 else st.just(set())))
    counts = [after - before for before, after in zip([0, *cuts], [*cuts, len(sizes)], strict=True)]
    other = regrouped(plan, counts)
    ranks = [Rank(late_ms=late, copy_ms=0) for late in late_ms]
    (step,) = steps_of(recording(ranks, plan, wire=WIRE))
    (truth,) = steps_of(recording(ranks, other, wire=WIRE))
    predicted = predict(step, other, LINK)
    for found, true in zip(predicted.ranks, truth.ranks, strict=True):
        assert found.parts_ns[Activity.EXPOSED] == pytest.approx(true.parts_ns[Activity.EXPOSED], abs=100)
        assert found.length_ns - step.ranks[0].parts_ns[Activity.OTHER] == pytest.approx(
            true.length_ns - truth.ranks[0].parts_ns[Activity.OTHER], abs=100
        )
        for wire, history in zip(wires(predicted), true.buckets, strict=True):
            assert wire.end_ns == pytest.approx(history.completed_ns, abs=100)


def test_buckets_are_launched_in_the_order_of_the_plan() -> None:
    plan = layout([[1], [1]])
    (step,) = steps_of(recording([Rank()], plan, wire=WIRE))
    backwards = plan_from_groups(plan.params, [[1], [0]], "by hand")
    first, second = wires(predict(step, backwards, LINK))
    launches = [bucket.launched_ns for bucket in step.ranks[0].buckets]
    assert first.begin_ns == pytest.approx(launches[1], abs=100), "what leaves first is ready last"
    assert second.begin_ns == first.end_ns


def test_copying_back_overlaps_with_what_is_still_on_the_wire() -> None:
    ranks, plan = [Rank(copy_ms=0.5)], layout([[1], [1], [1], [1]])
    (step,) = steps_of(recording(ranks, plan, wire=WIRE))
    predicted = predict(step, plan, LINK)
    assert predicted.length_ns == pytest.approx(step.length_ns, abs=100)
    assert [span.activity for span in predicted.ranks[0].spans if span.bucket == 3] == [
        Activity.EXPOSED,
        Activity.COPY_BACK,
    ]


# ---------------------------------------------------------------------- other plans, other numbers of ranks

(STEP,) = steps_of(recording([Rank(), Rank(late_ms=2)], layout([[1] * 6, [1] * 6]), wire=WIRE))


def test_the_recorded_plan_comes_first_and_no_partition_twice() -> None:
    plans = alternatives(STEP, LINK)
    assert plans[0].title == "as recorded"
    assert plans[0].prediction.plan == STEP.plan
    partitions = [
        tuple(frozenset(s.param for s in b.slots) for b in plan.prediction.plan.buckets) for plan in plans
    ]
    assert len(set(partitions)) == len(partitions)


def test_from_one_bucket_to_one_per_parameter() -> None:
    counts = {plan.title: len(plan.prediction.plan.buckets) for plan in alternatives(STEP, LINK)}
    assert counts["one bucket"] == 1
    assert counts["a bucket per parameter"] == 12
    assert counts["buckets of 4 MiB"] == 3


def test_the_computed_plan_is_predicted_to_be_the_quickest() -> None:
    plans = alternatives(STEP, LINK)
    assert plans[-1].code == 'bucket_cap_mb="auto"'
    assert plans[-1].prediction.length_ns == min(plan.prediction.length_ns for plan in plans)
    assert plans[-1].prediction.length_ns < plans[0].prediction.length_ns


def test_arguments_are_written_as_in_python() -> None:
    codes = {plan.title: plan.code for plan in alternatives(STEP, LINK)}
    assert codes["buckets of 4 MiB"] == "bucket_cap_mb=4"
    assert codes["default: 1 MiB, then 25 MiB"] == ""


def test_gradients_that_never_came_are_last_in_order() -> None:
    rank = STEP.ranks[0]
    partial = {param: t for param, t in rank.ready_ns.items() if param != 3}
    step = replace(STEP, ranks=(replace(rank, ready_ns=partial), STEP.ranks[1]))
    assert ready_order(step) == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 3]
    assert alternatives(step, LINK)


def test_a_bucket_none_of_which_came_leaves_when_backward_ends() -> None:
    rank = STEP.ranks[1]
    step = replace(STEP, ranks=(STEP.ranks[0], replace(rank, ready_ns={0: rank.ready_ns[0]})))
    predicted = predict(step, step.plan, Link(0.0, 1e12))
    assert wires(predicted)[0].begin_ns == pytest.approx(STEP.ranks[0].buckets[0].launched_ns, abs=100)
    assert wires(predicted)[1].begin_ns == pytest.approx(rank.gradients_complete_ns, abs=100)


def test_more_ranks_in_a_ring_take_longer_over_the_same_wires() -> None:
    """2 ranks: 2 rounds with half of the bytes; 4 ranks: 6 with a quarter. So 3 latencies for one, 1.5 bytes."""
    predicted = with_other_ranks(STEP, LINK)
    assert list(predicted) == [4, 8, 16]
    wire = wires(predicted[4])[0]
    nbytes = STEP.plan.buckets[0].nbytes
    assert wire.length_ns / 1e9 == pytest.approx(3 * 0.5e-3 + 1.5 * nbytes / LINK.bytes_per_s)
    lengths = [predict(STEP, STEP.plan, LINK).length_ns, *(step.length_ns for step in predicted.values())]
    assert lengths == sorted(lengths)


def test_one_rank_sends_nothing_so_nothing_is_known_of_more() -> None:
    (alone,) = steps_of(recording([Rank()], layout([[1], [2]]), wire=WIRE))
    assert with_other_ranks(alone, LINK) == {}
