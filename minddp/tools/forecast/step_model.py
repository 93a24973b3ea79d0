"""The model of a backward and its messages by a plan: the one model of a step in minddp. Pure arithmetic.

Backward computes; a bucket can leave when it has computed for a known time. One message travels at a time, in plan
order, and takes `Link.seconds`.

[Note: messages take time from backward]
On a CPU, threads move and add the bytes, and where the ranks have no spare core, backward is blocked for the share
`taken` of each message; beside a GPU's kernels it is 0. Imagine a clock that stops for that share of each message.
By this clock backward computes as if no message travelled, and a message takes `(1 - taken) * seconds`. At the end
the clock is behind by `taken` times the time of all messages, whenever they left.

[Note: calibration]
The link is measured while nothing else runs, but is used while backward runs, on a CPU on the same cores. The
observed backward shows two numbers:

    exposed  =  its end - when all gradients were complete              messages travelled, backward was over
    blocked  =  when all were complete - how long it had computed       backward waited, messages travelled

The other messages travelled while backward computed or was blocked, so `taken` is `blocked / (all messages -
exposed)`, and the bandwidth is the one with which the model ends when backward did. With one bucket nothing shows
the share: it is charged for all that backward was blocked. Where nothing is exposed, the measured link stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from minddp.core.plan import BucketPlan, plan_from_readiness
from minddp.tools.forecast.link import Link

Times = Mapping[int, float] | Sequence[float]  # seconds by parameter


class Message(NamedTuple):
    """Gradients that travel together; the last is ready when backward has computed for `ready_s` on every rank."""

    nbytes: int
    ready_s: float


def simulate(messages: Sequence[Message], link: Link) -> list[float]:
    """When each of `messages` has arrived, in seconds since backward began. They leave in this order.

    See [Note: messages take time from backward].
    """
    arrivals_s, free_s, behind_s = [], 0.0, 0.0
    for nbytes, ready_s in messages:
        message_s = link.seconds(nbytes)
        begin_s = max(free_s, ready_s)
        arrivals_s.append(begin_s + behind_s + message_s)
        free_s = begin_s + (1 - link.taken) * message_s
        behind_s += link.taken * message_s
    return arrivals_s


def predicted_s(plan: BucketPlan, link: Link, ready_s: Times, computed_s: float) -> float:
    """When a backward by `plan` ends: all gradients are computed, which takes `computed_s`, and reduced."""
    messages = [
        Message(bucket.nbytes, max(ready_s[slot.param] for slot in bucket.slots)) for bucket in plan.buckets
    ]
    behind_s = link.taken * sum(link.seconds(message.nbytes) for message in messages)
    return max([computed_s + behind_s, *simulate(messages, link)])


@dataclass(frozen=True)
class Job:
    """The work of one rank in a step, in seconds; all ranks are assumed to compute equally long.

    A whole step without communication takes `alone_s`, its backward `backward_s`, until a parameter's gradient is
    ready `ready_s`.
    """

    alone_s: float
    backward_s: float
    ready_s: Mapping[int, float]
    plan: BucketPlan

    def exposed_s(self, link: Link) -> float:
        """Communication over `link` that computing does not hide."""
        return predicted_s(self.plan, link, self.ready_s, self.backward_s) - self.backward_s

    def step_s(self, link: Link) -> float:
        """A step with messages over `link`, which may be that of another cluster: see `all_reduce`."""
        return self.alone_s + self.exposed_s(link)

    def with_caps(self, caps_bytes: Sequence[int]) -> Job:
        """This job with the buckets that DDP makes for these capacities."""
        order = sorted(range(len(self.plan.params)), key=self.ready_s.__getitem__)
        return replace(self, plan=plan_from_readiness(self.plan.params, order, caps_bytes))


@dataclass(frozen=True)
class Observed:
    """One backward, in seconds since it began.

    Until a parameter's gradient was ready it had computed for `ready_s`, in all for `computed_s`. All gradients
    were ready at `gradients_complete_s`, and all was over at `end_s`.
    """

    ready_s: Mapping[int, float]
    computed_s: float
    gradients_complete_s: float
    end_s: float


def calibrated(link: Link, plan: BucketPlan, seen: Observed) -> Link:
    """`link` under a backward, from the backward that was `seen` with `plan`. See [Note: calibration].

    Where messages cost less than alone, their latency also does.
    """
    exposed_s = seen.end_s - seen.gradients_complete_s
    blocked_s = max(0.0, seen.gradients_complete_s - seen.computed_s)

    def under_backward(factor: float) -> Link:
        slower = Link(link.latency_s * min(1.0, factor), link.bytes_per_s / factor)
        hidden_s = len(plan.buckets) * slower.latency_s + plan.nbytes / slower.bytes_per_s - exposed_s
        return replace(slower, taken=blocked_s / max(blocked_s, hidden_s) if blocked_s else 0.0)

    low, factor, high = 1e-6, 1.0, link.bytes_per_s * seen.end_s / max(1, plan.nbytes)  # the bytes alone take all
    for _ in range(60):
        end_s = predicted_s(plan, under_backward(factor), seen.ready_s, seen.computed_s)
        if math.isclose(end_s, seen.end_s):
            break
        low, high = (factor, high) if end_s < seen.end_s else (low, factor)
        factor = math.sqrt(low * high)
    return under_backward(factor)
