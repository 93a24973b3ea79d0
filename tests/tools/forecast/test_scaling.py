"""A step on other clusters: its limits, and what it has to do with closed forms."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minddp.core.plan import plan_from_groups
from minddp.tools.forecast.cluster import Cluster, all_reduce
from minddp.tools.forecast.link import FREE, Link
from minddp.tools.forecast.scaling import Forecast, Job, forecast
from minddp.tools.forecast.step_model import Observed, predicted_s
from minddp.tools.xray.forecast_command import job_of

HOP = Link(20e-6, 1e9)
MIB = 1024 * 1024
JOB = job_of([(4 * MIB, 0.01 * k) for k in range(1, 11)], alone_s=0.15, backward_s=0.1).with_caps([4 * MIB])


def on(ranks: int, job: Job = JOB, hop: Link = HOP, cores: float | None = None, overlaps: bool = True) -> Forecast:
    cluster = Cluster(ranks, 1, hop, hop, cores)
    return forecast(job, cluster, all_reduce(cluster), overlaps=overlaps)


def test_a_rank_alone_takes_what_it_computes():
    assert on(1) == Forecast(0.15, 0.15, 0.0)
    assert on(1).efficiency == 1


def test_an_infinite_wire_costs_nothing():
    assert on(8, hop=FREE) == Forecast(0.15, 0.15, 0.0)


def test_without_overlap_all_of_the_ring_is_exposed():
    n, nbytes = 8, 40 * MIB
    ring_s = 10 * 2 * (n - 1) * 20e-6 + 2 * (n - 1) / n * nbytes / 1e9
    assert on(n, overlaps=False).exposed_s == pytest.approx(ring_s)


def test_with_overlap_only_the_last_bucket_of_a_fast_wire_is_exposed():
    last_s = 14 * 20e-6 + 1.75 * 4 * MIB / 1e9
    assert last_s < 0.01, "the wire is free again when the next gradient is ready"
    assert on(8).exposed_s == pytest.approx(last_s)


def test_it_is_the_model_of_the_bucket_planner():
    cluster = Cluster(4, 1, HOP, HOP, cores=4)
    link = all_reduce(cluster)
    assert link.taken == 1
    end_s = predicted_s(JOB.plan, link, Observed(dict(JOB.ready_s), JOB.backward_s, 0.0, 0.0))
    assert forecast(JOB, cluster, link).step_s == pytest.approx(JOB.alone_s - JOB.backward_s + end_s)


@given(n=st.integers(1, 50), latency_us=st.integers(0, 500), gbyte=st.integers(1, 50))
def test_more_ranks_a_slower_wire_and_no_overlap_never_help(n: int, latency_us: int, gbyte: int):
    hop = Link(latency_us / 1e6, gbyte * 1e9)
    slower = Link(2 * hop.latency_s, hop.bytes_per_s / 2)
    step_s = on(n, hop=hop).step_s
    for worse in (on(n + 1, hop=hop), on(n, hop=slower), on(n, hop=hop, overlaps=False)):
        assert step_s <= worse.step_s + 1e-12


@pytest.mark.parametrize("cores", [None, 2])
@pytest.mark.parametrize("rate", [3e8, 1e9, 4e9])
def test_auto_buckets_are_the_best_of_all(cores: float | None, rate: float):
    """Of the 128 ways to divide eight gradients in order."""
    hop = Link(50e-6, rate)
    cluster = Cluster(64, 8, hop, hop, cores)
    link = all_reduce(cluster)
    job = job_of([(k * MIB // 2, 0.01 * k) for k in range(1, 9)], alone_s=0.15, backward_s=0.1)
    steps_s = []
    for ends in itertools.chain.from_iterable(itertools.combinations(range(1, 8), n) for n in range(8)):
        groups = [range(*ends) for ends in itertools.pairwise([0, *ends, 8])]
        changed = replace(job, plan=plan_from_groups(job.plan.params, groups, "by hand"))
        steps_s.append(forecast(changed, cluster, link).step_s)
    assert len(steps_s) == 128
    assert forecast(job.with_auto_buckets(cluster, link), cluster, link).step_s == pytest.approx(min(steps_s))


def test_ranks_that_share_a_core_compute_for_longer():
    assert on(4, hop=FREE, cores=1).step_s == pytest.approx(4 * 0.15)
    assert on(4, hop=FREE, cores=4).step_s == pytest.approx(0.15)
