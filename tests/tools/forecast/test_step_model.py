"""The model of a step, and a link fitted to a backward, with which the model reproduces what was measured."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minddp.core.plan import BucketPlan, ParamSpec, plan_from_groups
from minddp.tools.forecast.link import FREE, Link, all_reduce
from minddp.tools.forecast.step_model import Job, Message, Observed, calibrated, predicted_s, simulate
from tests.tools.forecast.made_up import simulated

IDLE = Link(latency_s=1e-3, bytes_per_s=1e9)
SPECS = [ParamSpec(f"p{i}", 1_000_000, torch.float32, torch.device("cpu")) for i in range(3)]  # 4 MB each
READY_S = {0: 10e-3, 1: 20e-3, 2: 30e-3}
COMPUTED_S = 30.1e-3


def plan(*groups: list[int]) -> BucketPlan:
    return plan_from_groups(SPECS, groups, origin="by hand")


APART = plan([0], [1], [2])


def test_messages_travel_one_at_a_time_and_in_order() -> None:
    """Each takes 2 ms. The second is ready while the first travels, the third before the second."""
    messages = [Message(1_000_000, 1e-3), Message(1_000_000, 2e-3), Message(1_000_000, 1.5e-3)]
    assert simulate(messages, IDLE) == pytest.approx([3e-3, 5e-3, 7e-3])


@pytest.mark.parametrize("taken", [0.0, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("times_slower", [1.0, 2.5, 6.0])
def test_calibration_recovers_the_parameters_of_a_simulated_link(taken: float, times_slower: float) -> None:
    """Where the model is exact, it recovers bandwidth and share, and predicts every plan exactly."""
    world = Link(IDLE.latency_s, IDLE.bytes_per_s / times_slower, taken)
    seen = simulated(APART, READY_S, world, COMPUTED_S)
    link = calibrated(IDLE, APART, seen)
    assert (link.latency_s, link.bytes_per_s) == pytest.approx((world.latency_s, world.bytes_per_s))
    assert link.taken == pytest.approx(taken, abs=1e-6)
    for other in (plan([0, 1], [2]), plan([0], [1, 2]), plan([0, 1, 2])):
        end_s = simulated(other, READY_S, world, COMPUTED_S).end_s
        assert predicted_s(other, link, READY_S, COMPUTED_S) == pytest.approx(end_s)


_seconds = st.floats(1e-3, 0.2)


@settings(max_examples=100, deadline=None)
@given(stood_still_s=st.just(0.0) | _seconds, exposed_s=_seconds, groups=st.sampled_from([APART, plan([0, 1, 2])]))
def test_the_plan_in_use_is_predicted_as_it_was(stood_still_s: float, exposed_s: float, groups: BucketPlan) -> None:
    complete_s = COMPUTED_S + stood_still_s
    seen = Observed(READY_S, COMPUTED_S, complete_s, complete_s + exposed_s)
    link = calibrated(IDLE, groups, seen)
    assert predicted_s(groups, link, seen.ready_s, seen.computed_s) == pytest.approx(seen.end_s, rel=1e-6)
    assert 0 <= link.taken <= 1


@pytest.mark.parametrize("stood_still_s", [0.0, 6e-3])
def test_where_nothing_is_exposed_the_link_is_as_it_was_alone(stood_still_s: float) -> None:
    complete_s = 40e-3 + stood_still_s  # the last gradient is ready after 30 ms
    link = calibrated(IDLE, APART, Observed(READY_S, 40e-3, complete_s, complete_s))
    assert (link.latency_s, link.bytes_per_s) == (IDLE.latency_s, IDLE.bytes_per_s)
    assert link.taken == pytest.approx(stood_still_s / 15e-3)  # of three messages of 5 ms


def test_messages_that_cost_less_than_alone() -> None:
    """Alone each had a latency of 2 ms, here all of the last is over in a quarter of that."""
    seen = Observed(READY_S, COMPUTED_S, gradients_complete_s=COMPUTED_S, end_s=30.5e-3)
    link = calibrated(dataclasses.replace(IDLE, latency_s=2e-3), APART, seen)
    assert link.seconds(4_000_000) == pytest.approx(0.5e-3)
    assert predicted_s(APART, link, seen.ready_s, seen.computed_s) == pytest.approx(30.5e-3)


def test_with_one_bucket_nothing_is_hidden() -> None:
    """So nothing shows what more of them would take: all idle time of backward is attributed to it."""
    together = plan([0, 1, 2])
    seen = Observed(READY_S, COMPUTED_S, gradients_complete_s=32e-3, end_s=42e-3)
    link = calibrated(IDLE, together, seen)
    assert link.taken > 0.9
    apart_s, together_s = (predicted_s(each, link, READY_S, COMPUTED_S) for each in (APART, together))
    assert apart_s > together_s


# ---------------------------------------------------------------------- a step on other clusters

HOP = Link(20e-6, 1e9)
MIB = 1024 * 1024
LAYERS = [ParamSpec(f"p{i}", MIB, torch.float32, torch.device("cpu")) for i in range(10)]  # 4 MiB each
LAYERS_READY_S = {i: 0.01 * (i + 1) for i in range(10)}
JOB = Job(0.15, 0.1, LAYERS_READY_S, plan_from_groups(LAYERS, [range(10)], "together")).with_caps([4 * MIB])


def on(ranks: int, hop: Link = HOP, job: Job = JOB) -> float:
    """The exposed communication."""
    return job.exposed_s(all_reduce(ranks, 1, hop, hop))


@pytest.mark.parametrize(("ranks", "hop"), [(1, HOP), (8, FREE)])
def test_a_rank_alone_or_an_infinite_wire_exposes_nothing(ranks: int, hop: Link) -> None:
    assert on(ranks, hop) == 0.0
    assert JOB.step_s(all_reduce(ranks, 1, hop, hop)) == JOB.alone_s


def test_without_overlap_all_of_the_ring_is_exposed() -> None:
    n, nbytes = 8, 40 * MIB
    ring_s = 10 * 2 * (n - 1) * 20e-6 + 2 * (n - 1) / n * nbytes / 1e9
    late = dataclasses.replace(JOB, ready_s=dict.fromkeys(JOB.ready_s, JOB.backward_s))
    assert on(n, job=late) == pytest.approx(ring_s)


def test_with_overlap_only_the_last_bucket_of_a_fast_wire_is_exposed() -> None:
    last_s = 14 * 20e-6 + 1.75 * 4 * MIB / 1e9
    assert last_s < 0.01, "the wire is free again when the next gradient is ready"
    assert on(8) == pytest.approx(last_s)
