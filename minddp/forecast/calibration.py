"""How long a backward takes by a plan, and the link with which the model tells what was measured. Pure arithmetic.

[Note: calibration]
The link is measured while nothing else runs, but will be used while backward runs, on a CPU on the very same cores.
How fast it is then, and what it takes from backward, depends on more than can be counted: spare cores, quotas and
affinities, who else is there, what the threads of a transport do. But the backward that was observed has met all
of it, and beside when gradients were ready it tells two numbers:

    exposed      =  its end - when all gradients were complete              messages travelled, backward was over
    stood still  =  when all were complete - how long it had computed      backward waited, messages travelled

What was not exposed of the messages has travelled while backward computed or stood still, so the share that they
take is `stood still / (all messages - exposed)`. The bandwidth is then the one with which the model ends when
backward did: with a slower link the share is smaller and more is exposed, so one bandwidth fits. It also stands for
packing and copying back, which are paid by the byte as well; a latency stays what it is.

What this cannot tell apart: other programs that take the cores, and helper threads for which backward sleeps,
count as messages. Of one bucket nothing is hidden, so nothing is learned of the share: if backward stood still at
all, the message gets all the blame, and one bucket remains the choice. And where nothing is exposed, any link that
is fast enough would do: then it is the one that was measured alone.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from minddp.core.plan import BucketPlan
from minddp.forecast.link import Link
from minddp.forecast.planner import Gradient, simulate


@dataclass(frozen=True)
class Observed:
    """One backward, in seconds since it began.

    `ready_s`, by parameter, and `computed_s` are how long it had computed until a gradient was ready, and in all;
    see `Clock.computed_s`. `gradients_complete_s` and `end_s` are when that was so, and when all was over.
    """

    ready_s: dict[int, float]
    computed_s: float
    gradients_complete_s: float
    end_s: float


def predicted_s(plan: BucketPlan, link: Link, seen: Observed) -> float:
    """When a backward ends by `plan`: when all gradients are computed, and all are reduced."""
    slots = [slot for bucket in plan.buckets for slot in bucket.slots]
    gradients = [Gradient(plan.params[slot.param].nbytes, seen.ready_s.get(slot.param, 0.0)) for slot in slots]
    ends = list(itertools.accumulate(len(bucket.slots) for bucket in plan.buckets))
    return simulate(gradients, ends, link, seen.computed_s)


def calibrated(link: Link, plan: BucketPlan, seen: Observed) -> Link:
    """`link` as it is under a backward, judging by what was `seen` with `plan`. See [Note: calibration].

    Where messages cost less than alone, so does their latency.
    """
    nbytes = sum(param.nbytes for param in plan.params)
    exposed_s = seen.end_s - seen.gradients_complete_s
    stood_still_s = max(0.0, seen.gradients_complete_s - seen.computed_s)

    def under_backward(factor: float) -> Link:
        slower = Link(link.latency_s * min(1.0, factor), link.bytes_per_s / factor)
        hidden_s = len(plan.buckets) * slower.latency_s + nbytes / slower.bytes_per_s - exposed_s
        return replace(slower, taken=stood_still_s / max(stood_still_s, hidden_s) if stood_still_s else 0.0)

    low, factor, high = 1e-6, 1.0, link.bytes_per_s * seen.end_s / max(1, nbytes)  # then the bytes alone take all
    for _ in range(60):
        end_s = predicted_s(plan, under_backward(factor), seen)
        if math.isclose(end_s, seen.end_s):
            break
        low, high = (factor, high) if end_s < seen.end_s else (low, factor)
        factor = math.sqrt(low * high)
    return under_backward(factor)
