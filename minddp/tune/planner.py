"""Which buckets expose the least communication: an exact answer for a simple model of a step.

The model: gradients become ready one after the other, at known times. A bucket is a run of neighbours in that
order and can leave when its last gradient is ready. One message travels at a time, in order, and takes what
`Link.seconds` says. What is not over when backward ends is exposed.

[Note: why the recursion is exact]
Let F(i) be the earliest time at which the first i gradients can all have been reduced. Their last bucket holds
gradients k+1 ... i for some k; it leaves when the last of them is ready and the messages before it are over:

    F(i) = min over k < i of  max(F(k), ready(i)) + seconds(bytes(k+1 ... i))

Reducing the first k sooner can never make the rest later, so the best way to do i contains the best way to do k.
All n * n / 2 last buckets are tried; nothing is guessed.

Buckets hold one dtype on one device. Each kind is planned by itself, as if it had the wire alone, and the buckets
then leave in the order in which they are ready; for models of one kind, as nearly all are, the answer is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minddp.plan import BucketPlan, ParamSpec, plan_from_groups
from minddp.tune.link import Link


@dataclass(frozen=True)
class Gradient:
    """A gradient as the planner sees it: its size, and when it is ready, in seconds since backward began."""

    nbytes: int
    ready_s: float


def least_exposed(gradients: Sequence[Gradient], link: Link) -> list[int]:
    """Cut `gradients`, in order of readiness, into buckets: returns where each bucket ends (exclusive).

    Of equally good cuts, the one with the fewest messages before the last.
    """
    ready = np.maximum.accumulate([gradient.ready_s for gradient in gradients])
    before = np.concatenate([[0], np.cumsum([gradient.nbytes for gradient in gradients])])  # bytes of the first k
    finish = np.zeros(len(gradients) + 1)
    cut = np.zeros(len(gradients) + 1, dtype=np.int64)
    for i in range(1, len(gradients) + 1):
        last_bucket_s = link.latency_s + (before[i] - before[:i]) / link.bytes_per_s
        candidates = np.maximum(finish[:i], ready[i - 1]) + last_bucket_s
        cut[i] = int(np.argmin(candidates))
        finish[i] = candidates[cut[i]]
    ends = [len(gradients)]
    while cut[ends[-1]] > 0:
        ends.append(int(cut[ends[-1]]))
    return ends[::-1]


def simulate(gradients: Sequence[Gradient], ends: Sequence[int], link: Link) -> float:
    """When the last message is over, in seconds since backward began, with the buckets that end at `ends`."""
    finish, start = 0.0, 0
    for end in ends:
        bucket = gradients[start:end]
        ready = max(gradient.ready_s for gradient in bucket)
        finish = max(finish, ready) + link.seconds(sum(gradient.nbytes for gradient in bucket))
        start = end
    return finish


def plan_buckets(specs: Sequence[ParamSpec], ready_s: Sequence[float], link: Link) -> BucketPlan:
    """The plan with the least exposed communication; `ready_s[i]` is when parameter i's gradient is ready."""
    order = sorted(range(len(specs)), key=lambda param: ready_s[param])
    kinds: dict[object, list[int]] = {}
    for param in order:
        spec = specs[param]
        kinds.setdefault(param if spec.sparse else (spec.dtype, spec.device), []).append(param)
    groups: list[list[int]] = []
    for params in kinds.values():
        ends = least_exposed([Gradient(specs[param].nbytes, ready_s[param]) for param in params], link)
        groups += [params[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    groups.sort(key=lambda group: ready_s[group[-1]])
    return plan_from_groups(specs, groups, origin="least exposed communication")
