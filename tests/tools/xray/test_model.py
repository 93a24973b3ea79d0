"""The ideal wire of made-up recordings is the model, so predicting one recording from another must be exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minddp.core.plan import BucketPlan, plan_from_groups
from minddp.tools.forecast.link import Link
from minddp.tools.xray.model import Costs, costs_of, predicted_ns
from minddp.tools.xray.reading import steps_of
from minddp.tools.xray.timeline import RecordedStep
from tests.tools.xray.made_up import MIB, MS, SLOW, Rank, layout, recording

COSTS = Costs(SLOW)


def made(ranks: Sequence[Rank], plan: BucketPlan, steps: int = 1, wire: Link = SLOW) -> list[RecordedStep]:
    return list(steps_of(recording(ranks, plan, wire=wire, steps=steps, meet=False)))


def fitted(steps: list[RecordedStep]) -> Costs:
    by_length = sorted(steps, key=lambda step: step.length_ns)
    return costs_of(steps, by_length[len(steps) // 2])


# ---------------------------------------------------------------------- what things cost


def test_what_messages_and_copies_cost_is_found_in_the_recording() -> None:
    found = fitted(made([Rank(copy_ms=0.5), Rank(copy_ms=0.5, late_ms=3)], layout([[1], [2], [0.5]])))
    assert (found.wire.latency_s, found.wire.bytes_per_s) == pytest.approx(
        (SLOW.latency_s, SLOW.bytes_per_s), rel=1e-3
    )
    assert found.copy.seconds(2 * MIB) == pytest.approx(0.5e-3, rel=0.01)


def steps_by(wires: list[Link], sizes: list[list[float]]) -> list[RecordedStep]:
    """One step of one rank by each of these wires."""
    return [step for wire in wires for step in made([Rank()], layout(sizes), wire=wire)]


def test_one_outlier_of_many_does_not_matter() -> None:
    found = fitted(steps_by([SLOW] * 4 + [Link(0.9, 1000 * MIB)], [[1], [2], [4]]))
    assert found.wire.bytes_per_s == pytest.approx(SLOW.bytes_per_s, rel=1e-3)


def test_messages_of_about_one_size_do_not_show_a_latency() -> None:
    found = fitted(steps_by([Link(ms / 1e3, 1e18) for ms in (250, 750, 500)], [[1]]))
    assert found.wire == Link(0.0, MIB / 0.5)
    assert fitted(made([Rank()], layout([[1], [1.5]]))).wire.latency_s == 0


def test_messages_take_as_long_in_all_as_they_did() -> None:
    """The first message of each backward is ten times as slow as the others: the median does not see it."""
    (step,) = made([Rank(backward_ms=1)], layout([[2]] + [[1]] * 6))
    (rank,) = step.ranks
    moved = tuple(replace(bucket, completed_ns=bucket.completed_ns + 30 * MS) for bucket in rank.buckets)
    rank = replace(rank, buckets=moved)
    step = replace(step, ranks=(rank,))
    found = fitted([step])
    in_all = sum(step.on_the_wire(bucket.index, rank).length_ns for bucket in moved)
    assert sum(found.wire.seconds(b.nbytes) for b in rank.buckets) == pytest.approx(in_all / 1e9)


def test_nothing_observed_is_nothing_fitted() -> None:
    (step,) = made([Rank()], layout([[1]]))
    (rank,) = step.ranks
    silent = replace(rank, buckets=tuple(replace(bucket, completed_ns=None) for bucket in rank.buckets))
    assert fitted([replace(step, ranks=(silent,))]) is None


# ---------------------------------------------------------------------- predictions


@given(
    st.lists(st.floats(0.05, 2), min_size=1, max_size=8),
    st.data(),
    st.lists(st.floats(0, 20), min_size=1, max_size=3),
)
def test_a_step_is_predicted_as_it_would_have_been(
    sizes: list[float], data: st.DataObject, loss_ms: list[float]
) -> None:
    plan = layout([sizes])
    cuts = data.draw(st.sets(st.integers(0, len(sizes)))) | {0, len(sizes)}
    groups = [range(*ends) for ends in pairwise(sorted(cuts))]
    other = plan_from_groups(plan.params, groups, "by hand")
    ranks = [Rank(loss_ms=ms, copy_ms=0) for ms in loss_ms]
    *_, truth = made(ranks, other, steps=3)
    (step,) = made(ranks, plan)
    assert predicted_ns(step, COSTS, other) == pytest.approx(truth.length_ns, abs=100)


@pytest.mark.parametrize("mib_ms", [0.5, 2, 10])
def test_a_step_by_another_wire_is_predicted_as_it_would_have_been(mib_ms: float) -> None:
    ranks, plan = [Rank(copy_ms=0.5), Rank(copy_ms=0.5, forward_ms=14)], layout([[1, 1], [2], [2]])
    (step,) = made(ranks, plan)
    costs = Costs(Link(0.5e-3, MIB / mib_ms * 1e3), copy=Link(0.5e-3, float("inf")))
    (truth,) = made(ranks, plan, wire=costs.wire)
    assert predicted_ns(step, costs) == pytest.approx(truth.length_ns, abs=100)


@pytest.mark.parametrize("ranks", [[Rank(forward_ms=14), Rank()], [Rank(), Rank(other_ms=9), Rank(optimizer_ms=4)]])
def test_a_recording_predicted_unchanged_is_itself(ranks: list[Rank]) -> None:
    for step in made([replace(rank, copy_ms=0) for rank in ranks], layout([[1, 1], [2]]), steps=4):
        assert predicted_ns(step, COSTS) == pytest.approx(step.length_ns, abs=100)


def test_buckets_are_launched_in_the_order_of_the_plan() -> None:
    """The bucket of the last gradient comes first, so that nothing travels before the end of backward."""
    plan = layout([[1], [1]])
    (step,) = made([Rank(copy_ms=0)], plan)
    backwards = plan_from_groups(plan.params, [[1], [0]], "by hand")
    (truth,) = made([Rank(copy_ms=0)], layout([[1, 1]]))
    second_ns = 1e9 * SLOW.latency_s
    assert predicted_ns(step, COSTS, backwards) == pytest.approx(truth.length_ns + second_ns, abs=100)


def test_a_bucket_none_of_which_came_leaves_when_backward_ends() -> None:
    plan = layout([[1], [1]])
    (step,) = made([Rank(copy_ms=0), Rank(copy_ms=0)], plan)
    rank = step.ranks[1]
    step = replace(step, ranks=(step.ranks[0], replace(rank, ready_ns={1: rank.ready_ns[1]})))
    both_after_ns = step.length_ns + 1e9 * SLOW.seconds(MIB)
    assert predicted_ns(step, COSTS) == pytest.approx(both_after_ns, abs=100)


def test_in_shared_memory_the_bytes_move_when_all_ranks_wait() -> None:
    (step,) = made([Rank(copy_ms=0), Rank(copy_ms=0, loss_ms=4)], layout([[1], [1]]))
    message_ns = 1e9 * SLOW.seconds(MIB)
    rest_ns = step.length_ns - message_ns  # the second follows the end of backward of rank 1
    in_wait = predicted_ns(replace(step, adds_after_ns=10**12), COSTS)
    assert in_wait == pytest.approx(rest_ns + 2 * message_ns, abs=100)
    soon = predicted_ns(replace(step, adds_after_ns=1 * MS), COSTS)
    assert soon == pytest.approx(rest_ns + message_ns, abs=100)
