"""Which buckets expose the least communication: an exact answer for a simple model of a step.

The model: gradients become ready one after the other, when backward has computed for known times. A bucket is a run
of neighbours in that order and can leave when its last gradient is ready. One message travels at a time, in order,
takes what `Link.seconds` says, and meanwhile takes the share `Link.taken` of that from backward. Exposed is what
all this adds to the time for which backward computes.

[Note: what messages take from backward]
Beside a GPU's kernels messages are taken to travel for nothing: `taken` is 0. On a CPU it is threads that move and
add their bytes, and where the ranks have no core to spare, backward stands still for them.

Imagine a clock that stands still for the share `taken` of each message. By this clock backward computes as if
nothing travelled, and a message takes the rest of its time, `(1 - taken) * seconds`: a step as without `taken`. At
the end the clock is behind by `taken` times the time of all messages, whenever they left. All plans move the same
bytes, so what of that depends on the plan is the number of messages, each of which pays the latency.

[Note: why the recursion is exact]
Let F(m, i) be the earliest time, by that clock, at which the first i gradients can have been reduced by m messages.
The last of these holds gradients k+1 ... i for some k; it leaves when the last of them is ready and the messages
before it are over:

    F(m, i) = min over k < i of  max(F(m - 1, k), ready(i)) + (1 - taken) * seconds(bytes(k+1 ... i))

Reducing the first k sooner by as many messages can never make the rest later, so the best way to do i contains the
best way to do k. The step is over when F(m, n) and backward are, later by what the clock is then behind; the best m
is the one for which that is soonest. All last buckets are tried, and more and more messages, until one more gets no
first i reduced sooner than fewer did: then more never will. Nothing is guessed.

Buckets hold one dtype on one device. Each kind is planned by itself, as if it had the wire alone, and the buckets
then leave in the order in which they are ready; for models of one kind, as nearly all are, the answer is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minddp.core.plan import BucketPlan, ParamSpec, plan_from_groups
from minddp.forecast.link import Link


@dataclass(frozen=True)
class Gradient:
    """A gradient as the planner sees it: its size, and how long backward computes until it is ready."""

    nbytes: int
    ready_s: float


def least_exposed(gradients: Sequence[Gradient], link: Link, backward_s: float = 0.0) -> list[int]:
    """Cut `gradients`, in order of readiness, into buckets: returns where each bucket ends (exclusive).

    `backward_s` is how long backward computes in all, if that is longer than until the last gradient is ready. Of
    equally good cuts, one with the fewest messages.
    """
    n = len(gradients)
    ready = np.maximum.accumulate([gradient.ready_s for gradient in gradients])
    before = np.concatenate([[0], np.cumsum([gradient.nbytes for gradient in gradients])])  # bytes of the first k
    finish = np.full(n + 1, np.inf)  # F(m, i)
    finish[0] = 0.0
    soonest = finish  # by any number of messages so far
    cuts: list[np.ndarray] = []  # of F(m, i): where the last bucket begins
    best_s, fewest = np.inf, 0
    for messages in range(1, n + 1):
        one_less, finish, cut = finish, np.full(n + 1, np.inf), np.zeros(n + 1, dtype=np.int64)
        for i in range(messages, n + 1):
            message_s = link.seconds(before[i] - before[:i])
            candidates = np.maximum(one_less[:i], ready[i - 1]) + (1 - link.taken) * message_s
            cut[i] = np.argmin(candidates)
            finish[i] = candidates[cut[i]]
        cuts.append(cut)
        behind_s = link.taken * (messages * link.latency_s + before[n] / link.bytes_per_s)
        if (end_s := max(finish[n], backward_s) + behind_s) < best_s:
            best_s, fewest = end_s, messages
        if not (finish < soonest).any():
            break
        soonest = np.minimum(soonest, finish)
    ends = [n]
    for cut in cuts[fewest - 1 : 0 : -1]:
        ends.append(int(cut[ends[-1]]))
    return ends[::-1]


def simulate(gradients: Sequence[Gradient], ends: Sequence[int], link: Link, backward_s: float = 0.0) -> float:
    """When backward and the last message are over, with the buckets that end at `ends`, in seconds since it began.

    `backward_s` is as for `least_exposed`. See [Note: what messages take from backward].
    """
    finish = behind = 0.0
    start = 0
    for end in ends:
        bucket = gradients[start:end]
        ready = max(gradient.ready_s for gradient in bucket)
        message_s = link.seconds(sum(gradient.nbytes for gradient in bucket))
        finish = max(finish, ready) + (1 - link.taken) * message_s
        behind += link.taken * message_s
        start = end
    return max(finish, backward_s) + behind


def plan_buckets(
    specs: Sequence[ParamSpec], ready_s: Sequence[float], link: Link, backward_s: float = 0.0
) -> BucketPlan:
    """The plan with the least exposed communication; `ready_s[i]` is when parameter i's gradient is ready."""
    order = sorted(range(len(specs)), key=lambda param: ready_s[param])
    kinds: dict[object, list[int]] = {}
    for param in order:
        spec = specs[param]
        kinds.setdefault(param if spec.sparse else (spec.dtype, spec.device), []).append(param)
    groups: list[list[int]] = []
    for params in kinds.values():
        gradients = [Gradient(specs[param].nbytes, ready_s[param]) for param in params]
        ends = least_exposed(gradients, link, backward_s)
        groups += [params[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    groups.sort(key=lambda group: ready_s[group[-1]])
    return plan_from_groups(specs, groups, origin="least exposed communication")
