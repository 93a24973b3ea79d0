"""Predicts the length of a step with another cluster or plan. Pure arithmetic.

A `Job` is the work of one rank in a step, a `Cluster` is where it runs. Messages follow the model of
`step_model.py`, as for the bucket planner and X-ray. All ranks are assumed to compute equally long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from minddp.core.plan import BucketPlan, plan_from_readiness
from minddp.tools.forecast.cluster import Cluster
from minddp.tools.forecast.link import Link
from minddp.tools.forecast.planner import plan_buckets
from minddp.tools.forecast.step_model import Message, finish_s, messages_of


@dataclass(frozen=True)
class Job:
    """The work of one rank in a step if it has a core to itself.

    A whole step without communication takes `alone_s`. Each parameter's gradient is ready `ready_s` after backward
    began.
    """

    alone_s: float
    backward_s: float
    ready_s: Mapping[int, float]
    plan: BucketPlan

    def with_caps(self, caps_bytes: Sequence[int]) -> Job:
        """This job with the buckets that DDP makes for these capacities."""
        order = sorted(self.ready_s, key=self.ready_s.__getitem__)
        return replace(self, plan=plan_from_readiness(self.plan.params, order, caps_bytes))

    def with_auto_buckets(self, cluster: Cluster, link: Link) -> Job:
        """This job with the buckets of `bucket_cap_mb="auto"`."""
        slower = cluster.crowding
        ready_s = [slower * self.ready_s[param] for param in range(len(self.plan.params))]
        return replace(self, plan=plan_buckets(self.plan.params, ready_s, link, slower * self.backward_s))


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
    backward_s = cluster.crowding * job.backward_s
    messages = [
        Message(nbytes, cluster.crowding * ready_s if overlaps else backward_s)
        for nbytes, ready_s in messages_of(job.plan, job.ready_s)
        if cluster.ranks > 1
    ]
    exposed_s = finish_s(messages, link, backward_s) - backward_s
    return Forecast(job.alone_s, cluster.crowding * job.alone_s + exposed_s, exposed_s)
