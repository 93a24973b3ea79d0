"""Predicts the length of a step with another cluster, plan or all-reduce algorithm. Pure arithmetic.

A `Job` is the work of one rank in a step, a `Cluster` is where it runs. Messages follow the model of
`step_model.py`, as for the bucket planner and X-ray:

    before backward  ->  backward, messages beside it  ->  exposed  ->  averages are copied back  ->  the rest

[Note: stragglers]
In each step all ranks wait for the slowest. A rank's computing time is assumed to be normally
distributed, independent of other ranks and steps, with a standard deviation of `jitter` times its mean. The
slowest of n ranks then takes 1 + jitter * e(n) times the mean, e(n) being the expected maximum of n standard
normal numbers: 0.56 for 2 ranks, 1.42 for 8, 3.04 for 512, 3.85 for 10,000. Ranks that are slow in each step
cost more, and so does a distribution with a heavier tail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

import numpy as np

from minddp.core.plan import BucketPlan, plan_from_readiness
from minddp.tools.forecast.cluster import Cluster
from minddp.tools.forecast.link import FREE, Link
from minddp.tools.forecast.planner import plan_buckets
from minddp.tools.forecast.step_model import Message, finish_s, messages_of, simulate


@dataclass(frozen=True)
class Job:
    """The mean work of one rank in a step if it has a core to itself.

    A whole step without communication takes `alone_s`. Each parameter's gradient is ready `ready_s` after backward
    began. `jitter`: see [Note: stragglers]. `copy` is the cost of copying a bucket back.
    """

    alone_s: float
    backward_s: float
    ready_s: Mapping[int, float]
    plan: BucketPlan
    jitter: float = 0.0
    copy: Link = FREE

    def with_caps(self, caps_bytes: Sequence[int]) -> Job:
        """This job with the buckets that DDP makes for these capacities."""
        order = sorted(self.ready_s, key=self.ready_s.__getitem__)
        return replace(self, plan=plan_from_readiness(self.plan.params, order, caps_bytes))

    def with_auto_buckets(self, cluster: Cluster, link: Link) -> Job:
        """This job with the buckets of `bucket_cap_mb="auto"`."""
        slower = self.slower_on(cluster)
        ready_s = [slower * self.ready_s[param] for param in range(len(self.plan.params))]
        return replace(self, plan=plan_buckets(self.plan.params, ready_s, link, slower * self.backward_s))

    def slower_on(self, cluster: Cluster) -> float:
        """The computing time of the slowest rank there, as a multiple of the mean."""
        return cluster.crowding * (1 + self.jitter * expected_maximum(cluster.ranks))


@dataclass(frozen=True)
class Forecast:
    """A step, in seconds: `ideal_s` for a rank alone; `exposed_s` of communication that computing does not hide."""

    ideal_s: float
    step_s: float
    exposed_s: float

    @property
    def efficiency(self) -> float:
        """The fraction of the ideal throughput under weak scaling: each rank keeps its batch size."""
        return self.ideal_s / self.step_s


def forecast(job: Job, cluster: Cluster, link: Link, *, overlaps: bool = True) -> Forecast:
    """Predict a step of `job` on `cluster` with messages over `link`; without overlap they leave after backward."""
    slower = job.slower_on(cluster)
    backward_s, computed_s = slower * job.backward_s, slower * job.alone_s
    messages = [
        Message(nbytes, slower * ready_s if overlaps else backward_s)
        for nbytes, ready_s in messages_of(job.plan, job.ready_s)
        if cluster.ranks > 1
    ]
    now_s = backward_s
    for (nbytes, _), transfer in zip(messages, simulate(messages, link), strict=True):
        now_s = max(now_s, transfer.end_s) + cluster.crowding * job.copy.seconds(nbytes)
    exposed_s = max(now_s, finish_s(messages, link, backward_s)) - backward_s
    return Forecast(job.alone_s, computed_s + exposed_s, exposed_s)


@cache
def expected_maximum(n: int) -> float:
    """The expected maximum of n standard normal numbers.

    With P(x), the probability that all are below x, it is the integral of 1 - P above 0 minus that of P below 0.
    """
    width = 0.005
    x = np.arange(-10 + width / 2, 10, width)
    all_below = np.array([NormalDist().cdf(float(at)) for at in x]) ** n
    return float(np.where(x > 0, 1 - all_below, -all_below).sum() * width)
