"""The buckets that expose the least communication: an exact answer for the model in `step_model.py`.

A bucket is a run of neighbours in the order in which gradients become ready. Let F(m, i) be the earliest time at
which the first i gradients can have been reduced by m messages, by the clock of [Note: messages take time from
backward]. The last message holds gradients k+1 ... i for some k; it leaves when the last of them is ready and the
messages before it are over:

    F(m, i) = min over k < i of  max(F(m - 1, k), ready(i)) + (1 - taken) * seconds(bytes(k+1 ... i))

The step is over when F(m, n) and backward are, later by the time that the clock is behind; the best m is the one
for which that is soonest. Once one more message reduces no first i sooner than fewer did, more never will.

Buckets hold one dtype on one device. Each kind is planned by itself, as if it had the link alone, so the answer is
exact for models of one kind, as nearly all are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minddp.core.plan import BucketPlan, ParamSpec, plan_from_groups
from minddp.tools.forecast.link import Link
from minddp.tools.forecast.step_model import Message


def least_exposed(gradients: Sequence[Message], link: Link, computed_s: float = 0.0) -> list[int]:
    """Divide `gradients`, in order of readiness, into buckets: returns where each bucket ends (exclusive).

    `computed_s` is how long backward computes in all, if that is longer than until the last gradient is ready. Of
    equally good divisions, one with the fewest messages.
    """
    n = len(gradients)
    ready = np.maximum.accumulate([gradient.ready_s for gradient in gradients])
    before = np.concatenate([[0], np.cumsum([gradient.nbytes for gradient in gradients])])  # bytes of the first k
    finish = np.full(n + 1, np.inf)  # F(m, i)
    finish[0] = 0.0
    soonest = finish  # by any number of messages so far
    last_begins: list[np.ndarray] = []  # for F(m, i): where the last bucket begins
    best_s, fewest = np.inf, 0
    for messages in range(1, n + 1):
        one_less, finish, begins = finish, np.full(n + 1, np.inf), np.zeros(n + 1, dtype=np.int64)
        for i in range(messages, n + 1):
            message_s = link.seconds(before[i] - before[:i])
            candidates = np.maximum(one_less[:i], ready[i - 1]) + (1 - link.taken) * message_s
            begins[i] = np.argmin(candidates)
            finish[i] = candidates[begins[i]]
        last_begins.append(begins)
        behind_s = link.taken * (messages * link.latency_s + before[n] / link.bytes_per_s)
        if (end_s := max(finish[n], computed_s) + behind_s) < best_s:
            best_s, fewest = end_s, messages
        if not (finish < soonest).any():
            break
        soonest = np.minimum(soonest, finish)
    ends = [n]
    for begins in last_begins[fewest - 1 : 0 : -1]:
        ends.append(int(begins[ends[-1]]))
    return ends[::-1]


def plan_buckets(
    specs: Sequence[ParamSpec], ready_s: Sequence[float], link: Link, computed_s: float = 0.0
) -> BucketPlan:
    """The plan with the least exposed communication; `ready_s[i]` is when parameter i's gradient is ready."""
    order = sorted(range(len(specs)), key=lambda param: ready_s[param])
    kinds: dict[object, list[int]] = {}
    for param in order:
        spec = specs[param]
        kinds.setdefault(param if spec.sparse else (spec.dtype, spec.device), []).append(param)
    groups: list[list[int]] = []
    for params in kinds.values():
        gradients = [Message(specs[param].nbytes, ready_s[param]) for param in params]
        ends = least_exposed(gradients, link, computed_s)
        groups += [params[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    groups.sort(key=lambda group: ready_s[group[-1]])
    return plan_from_groups(specs, groups, origin="least exposed communication")
