from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minddp.forecast.link import Link
from minddp.xray.predict import Transfer, fit, simulate, transfers
from minddp.xray.reading import steps_of
from minddp.xray.recording import BucketInfo, Layout
from minddp.xray.timeline import Activity
from tests.xray.made_up import MIB, MS, Rank, Wire, layout, recording

WIRE = Wire(latency_ns=MS // 2, bytes_per_ms=MIB / 4)
LINK = Link(0.5e-3, MIB / 4 * 1e3)


def regrouped(plan: Layout, counts: list[int]) -> Layout:
    """The same parameters in the same order, `counts[b]` of them in bucket b."""
    buckets, first = [], 0
    for count in counts:
        members = tuple(range(first, first + count))
        buckets.append(BucketInfo(members, sum(plan.params[p].nbytes for p in members)))
        first += count
    return Layout(plan.params, tuple(buckets), "by hand")


def test_the_wire_is_found_in_the_recording() -> None:
    found = fit(transfers(steps_of(recording([Rank(), Rank(late_ms=3)], layout([[1], [2], [0.5]]), wire=WIRE))))
    assert found is not None
    assert found.link.latency_s == pytest.approx(LINK.latency_s, rel=1e-3)
    assert found.link.bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=1e-3)
    assert (found.messages, found.sizes) == (6, 3)


def test_one_outlier_of_many_does_not_matter() -> None:
    observed = [Transfer(n * MIB, LINK.seconds(n * MIB)) for n in (1, 2, 4) for _ in range(5)]
    found = fit([*observed, Transfer(MIB, 1.0)])
    assert found is not None
    assert found.link.bytes_per_s == pytest.approx(LINK.bytes_per_s)


def test_messages_of_one_size_have_no_latency_to_tell() -> None:
    found = fit([Transfer(MIB, 0.25), Transfer(MIB, 0.75), Transfer(MIB, 0.5)])
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
    predicted = simulate(step, other, LINK)
    for foreseen, true in zip(predicted.ranks, truth.ranks, strict=True):
        assert foreseen.exposed_ns == pytest.approx(true.parts_ns[Activity.EXPOSED], abs=100)
        assert foreseen.length_ns - step.ranks[0].parts_ns[Activity.OTHER] == pytest.approx(
            true.length_ns - truth.ranks[0].parts_ns[Activity.OTHER], abs=100
        )
        for bucket, history in zip(foreseen.buckets, true.buckets, strict=True):
            assert bucket.end_ns == pytest.approx(history.completed_ns, abs=100)
            assert bucket.launched_ns == history.launched_ns


def test_buckets_leave_in_the_order_of_the_plan() -> None:
    plan = layout([[1], [1]])
    (step,) = steps_of(recording([Rank()], plan, wire=WIRE))
    backwards = Layout(plan.params, tuple(reversed(plan.buckets)), "by hand")
    first, second = simulate(step, backwards, LINK).ranks[0].buckets
    assert second.ready_ns < first.ready_ns == first.launched_ns == second.launched_ns
    assert second.begin_ns == first.end_ns


def test_copying_back_overlaps_with_what_is_still_on_the_wire() -> None:
    ranks, plan = [Rank(copy_ms=0.5)], layout([[1], [1], [1], [1]])
    (step,) = steps_of(recording(ranks, plan, wire=WIRE))
    predicted = simulate(step, plan, LINK)
    assert predicted.length_ns == pytest.approx(step.length_ns, abs=100)
    assert [span.activity for span in predicted.ranks[0].after][-2:] == [Activity.EXPOSED, Activity.COPY_BACK]
