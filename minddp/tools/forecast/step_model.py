"""How long a backward and its messages take by a plan: the one model of a step in minddp. Pure arithmetic.

The model: a bucket can leave when backward has computed for a known time. One message travels at a time, in plan
order, and takes what `Link.seconds` says; meanwhile backward stands still for the share `Link.taken`. The bucket
planner minimises by this model, X-ray predicts a recorded step under other plans and by other wires.

[Note: what messages take from backward]
Beside a GPU's kernels, messages are assumed to travel for free: `taken` is 0. On a CPU threads move and add their
bytes, and where the ranks have no spare core, backward stands still for them.

Imagine a clock that stands still for the share `taken` of each message. By this clock backward computes as if
nothing travelled, and a message takes the rest of its time, `(1 - taken) * seconds`: a step as without `taken`. At
the end the clock is behind by `taken` times the time of all messages, whenever they left. All plans move the same
bytes, so the part of that which depends on the plan is the number of messages, each with its latency.

[Note: calibration]
The link is measured while nothing else runs, but is used while backward runs, on a CPU on the very same cores. Its
speed then, and what it takes from backward, depend on more than can be counted: spare cores, quotas, affinities,
other programs, the threads of a transport. The observed backward has met all of these, and shows two numbers beside
the times of the gradients:

    exposed      =  its end - when all gradients were complete              messages travelled, backward was over
    stood still  =  when all were complete - how long it had computed      backward waited, messages travelled

The part of the messages that was not exposed travelled while backward computed or stood still, so the share that
they take is `stood still / (all messages - exposed)`. The bandwidth is then the one with which the model ends when
backward did: with a slower link the share is smaller and more is exposed, so one bandwidth fits. It also stands for
packing and copying back, which cost by the byte as well; a latency stays as it is.

What this cannot tell apart: other programs that take the cores, and helper threads for which backward sleeps,
count as messages. With one bucket nothing is hidden, so nothing shows the share: if backward stood still at all,
the message is charged for all of it, and one bucket remains the choice. Where nothing is exposed, any link that is
fast enough would fit: then it is the measured one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from minddp.core.plan import BucketPlan
from minddp.tools.forecast.link import Link


class Message(NamedTuple):
    """Gradients that travel together; `ready_s`: of backward's computing until the last is ready, on any rank."""

    nbytes: int
    ready_s: float


class Transfer(NamedTuple):
    """When the bytes of a message begin to move and when they have arrived, in seconds since backward began."""

    begin_s: float
    end_s: float


def simulate(messages: Sequence[Message], link: Link) -> list[Transfer]:
    """The transfers of `messages`, which leave in this order. See [Note: what messages take from backward]."""
    transfers, free_s, behind_s = [], 0.0, 0.0
    for nbytes, ready_s in messages:
        message_s = link.seconds(nbytes)
        begin_s = max(free_s, ready_s)
        transfers.append(Transfer(begin_s + behind_s, begin_s + behind_s + message_s))
        free_s = begin_s + (1 - link.taken) * message_s
        behind_s += link.taken * message_s
    return transfers


def finish_s(messages: Sequence[Message], link: Link, computed_s: float = 0.0) -> float:
    """When backward and the last message are over, if backward computes for `computed_s` in all."""
    behind_s = link.taken * sum(link.seconds(message.nbytes) for message in messages)
    return max([computed_s + behind_s, *(transfer.end_s for transfer in simulate(messages, link))])


def messages_of(plan: BucketPlan, ready_s: Mapping[int, float]) -> list[Message]:
    """The messages of a plan; `ready_s` by parameter, 0 where it is not known."""
    return [
        Message(bucket.nbytes, max(ready_s.get(slot.param, 0.0) for slot in bucket.slots))
        for bucket in plan.buckets
    ]


@dataclass(frozen=True)
class Observed:
    """One backward, in seconds since it began.

    `ready_s`, by parameter, and `computed_s` are how long it had computed until a gradient was ready, and in all;
    see `Clock.computed_s`. `gradients_complete_s` is when all gradients were ready, `end_s` when all was over.
    """

    ready_s: dict[int, float]
    computed_s: float
    gradients_complete_s: float
    end_s: float


def predicted_s(plan: BucketPlan, link: Link, seen: Observed) -> float:
    """When a backward ends by `plan`: when all gradients are computed, and all are reduced."""
    return finish_s(messages_of(plan, seen.ready_s), link, seen.computed_s)


def calibrated(link: Link, plan: BucketPlan, seen: Observed) -> Link:
    """`link` as it is under a backward, judging by what was `seen` with `plan`. See [Note: calibration].

    Where messages cost less than alone, so does their latency.
    """
    messages = messages_of(plan, seen.ready_s)
    nbytes = sum(message.nbytes for message in messages)
    exposed_s = seen.end_s - seen.gradients_complete_s
    stood_still_s = max(0.0, seen.gradients_complete_s - seen.computed_s)

    def under_backward(factor: float) -> Link:
        slower = Link(link.latency_s * min(1.0, factor), link.bytes_per_s / factor)
        hidden_s = len(messages) * slower.latency_s + nbytes / slower.bytes_per_s - exposed_s
        return replace(slower, taken=stood_still_s / max(stood_still_s, hidden_s) if stood_still_s else 0.0)

    low, factor, high = 1e-6, 1.0, link.bytes_per_s * seen.end_s / max(1, nbytes)  # then the bytes alone take all
    for _ in range(60):
        end_s = finish_s(messages, under_backward(factor), seen.computed_s)
        if math.isclose(end_s, seen.end_s):
            break
        low, high = (factor, high) if end_s < seen.end_s else (low, factor)
        factor = math.sqrt(low * high)
    return under_backward(factor)
