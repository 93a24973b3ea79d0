"""The recorded steps, played again with something changed. Pure.

[Note: how steps are played again]
A rank computes as recorded: what its spans took, each by a factor (`Change.factors`), one after the other. Its
gradients are ready at their places in backward; a bucket is launched when its last one is packed and all buckets
before it are launched. When all ranks have joined (see [Note: a bucket's passage]) it travels, one at a time, by
the model of `tools/forecast/step_model.py`. After backward a rank waits for each bucket and copies it back, then
goes on as recorded. Its next step begins when it is done, so a rank that is late in one phase makes others wait in
the next backward, wherever that phase lies. Buffers are waited for, too: no rank has them before rank 0 sends them.

What a message, packing and copying cost is fitted to the recording (`Costs`). A launch costs the thread that trains
what it took, and the time for which backward waited for cores that messages had grows and shrinks with that of all
messages: see [Note: core time]. Left out: small messages may travel side by side. Playing the recording unchanged
shows how far to trust the rest.

A step is measured from one last arrival to the next; one more step, equal to the first, is played before it.
"""

from __future__ import annotations

import enum
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from minddp.core.plan import BucketPlan
from minddp.tools.forecast.link import FREE, Link, fit_link
from minddp.tools.forecast.step_model import Message, simulate
from minddp.tools.xray.timeline import Activity, BucketHistory, Interval, RankStep, Span, Step

SIZES_APART = 2  # times as large: nearer ones do not show a latency


class Phase(enum.IntEnum):
    """What a rank is busy with; the first are numbered as the fields of `forecast.lateness.RankTimes`."""

    BETWEEN = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3  # and what comes between it and backward
    ACCUMULATION = 4
    LOSS = 5  # between forward and backward
    DATA = 6  # a part of what lies between steps


_PHASES = {
    Activity.FORWARD: Phase.FORWARD,
    Activity.LOSS: Phase.LOSS,
    Activity.BACKWARD: Phase.BACKWARD,
    Activity.OPTIMIZER: Phase.OPTIMIZER,
    Activity.DATA: Phase.DATA,
}


def busy(rank: RankStep) -> list[tuple[Span, Phase]]:
    """The spans of a complete step in which the rank neither waits for others nor copies."""
    complete_ns = _complete_ns(rank)
    forwards = [span.begin_ns for span in rank.spans if span.activity is Activity.FORWARD]
    optimizers = [span.begin_ns for span in rank.spans if span.activity is Activity.OPTIMIZER]
    found = []
    for span in rank.spans:
        if span.activity in (Activity.EXPOSED, Activity.COPY_BACK, Activity.BUFFERS):
            continue
        phase = _PHASES.get(span.activity, Phase.BETWEEN)
        if span.begin_ns < forwards[-1] and span.activity in (Activity.LOSS, Activity.BACKWARD, Activity.OTHER):
            phase = Phase.ACCUMULATION
        elif span.begin_ns >= complete_ns and phase is Phase.BETWEEN and span.begin_ns < max(optimizers, default=0):
            phase = Phase.OPTIMIZER
        found.append((span, phase))
    return found


def _complete_ns(rank: RankStep) -> int:
    complete_ns = rank.gradients_complete_ns
    assert complete_ns is not None, "a complete step has the end of its backward"
    return complete_ns


# ---------------------------------------------------------------------- what things cost


@dataclass(frozen=True)
class Costs:
    """What was seen: of `messages` on the wire, of packing and of copying back, by bytes, and by bucket.

    Messages of about one size do not show which part of their time was latency; it then counts as none, and
    `separates_latency` is False.
    """

    wire: Link
    messages: int
    pack: Link = FREE
    copy: Link = FREE
    wake_ns: float = 0.0  # from an arrival until its rank goes on
    separates_latency: bool = True


def costs_of(steps: Sequence[Step]) -> Costs | None:
    """Fitted to all buckets of complete steps. None if no message was seen to complete."""
    wires, packs, copies, wakes = _Samples(), _Samples(), _Samples(), [0.0]
    for step in steps:
        for rank in step.ranks:
            for bucket in rank.buckets:
                wire = step.on_the_wire(bucket.index, rank)
                wires.add(bucket.nbytes, wire.length_ns if wire else 0)
                packs.add(bucket.nbytes, sum(s.length_ns for s in rank.packs if s.bucket == bucket.index))
                about = [s for s in rank.spans if s.bucket == bucket.index]
                copies.add(bucket.nbytes, sum(s.length_ns for s in about if s.activity is Activity.COPY_BACK))
                for span in about:
                    if span.activity is Activity.EXPOSED and wire is not None:
                        wakes.append(span.end_ns - max(span.begin_ns, min(wire.end_ns, span.end_ns)))
    if not wires.link:
        return None
    return Costs(
        _as_long_in_all(wires.link, steps),
        sum(map(len, wires.values())),
        packs.link or FREE,
        copies.link or FREE,
        statistics.median(wakes[1:] or wakes),
        wires.separates_latency,
    )


def _as_long_in_all(link: Link, steps: Sequence[Step]) -> Link:
    """A link by which the messages of a median backward take as long in all as they did.

    A fit to single messages is not enough: the first may arrive late since its thread handles others before it.
    """
    ratios = []
    for step in steps:
        for rank in step.ranks:
            wires = [(b.nbytes, wire.length_ns) for b in rank.buckets if (wire := step.on_the_wire(b.index, rank))]
            if fitted_ns := 1e9 * sum(link.seconds(nbytes) for nbytes, _ in wires):
                ratios.append(sum(length_ns for _, length_ns in wires) / fitted_ns)
    ratio = max(statistics.median(ratios), 1e-6)
    return replace(link, latency_s=link.latency_s * ratio, bytes_per_s=link.bytes_per_s / ratio)


class _Samples(dict[int, list[float]]):
    """Seconds by number of bytes."""

    def add(self, nbytes: int, ns: int) -> None:
        if nbytes and ns > 0:
            self.setdefault(nbytes, []).append(ns / 1e9)

    @property
    def separates_latency(self) -> bool:
        return bool(self) and max(self) >= SIZES_APART * min(self)

    @property
    def link(self) -> Link | None:
        """The link that explains best the median time of each size."""
        medians = {nbytes: statistics.median(times) for nbytes, times in self.items()}
        if self.separates_latency:
            return fit_link(medians)
        return Link(0.0, sum(medians) / sum(medians.values())) if medians else None


# ---------------------------------------------------------------------- playing


@dataclass(frozen=True)
class Change:
    """What is different: the buckets, the costs, and how much longer a phase takes, by step, rank and phase.

    `title` says it, `code` as arguments or calls; `ranks` are those that are quicker. `shown` is the place of the
    step to show, if not the typical one.
    """

    plan: BucketPlan | None = None
    costs: Callable[[Costs], Costs] = lambda costs: costs
    factors: Mapping[tuple[int, int, Phase], float] = field(default_factory=dict)
    title: str = "as recorded"
    code: str = ""
    ranks: tuple[int, ...] = ()
    shown: int | None = None


class Replay(NamedTuple):
    """The steps as played, in order, and a step's length on average. See [Note: how steps are played again]."""

    steps: tuple[Step, ...]
    step_ns: float


def replay(steps: Sequence[Step], costs: Costs, change: Change = Change()) -> Replay:
    """All `steps`, which must be complete and have the same plan and ranks, with one `change`."""
    costs = change.costs(costs)
    begins = [rank.interval.begin_ns for rank in steps[0].ranks]
    played = []
    for t, step in [(0, steps[0]), *enumerate(steps)]:
        again = _play(step, t, begins, costs, change)
        begins = [rank.interval.end_ns for rank in again.ranks]
        played.append(again)
    return Replay(tuple(played[1:]), (_arrival_ns(played[-1]) - _arrival_ns(played[0])) / len(steps))


def _arrival_ns(step: Step) -> int:
    return max([t for rank in step.ranks for b in rank.buckets if (t := b.completed_ns)] or [step.begin_ns])


def _play(step: Step, t: int, begins: Sequence[int], costs: Costs, change: Change) -> Step:
    plan, begin_ns = change.plan or step.plan, min(begins)
    players: list[_Player] = []
    for rank, own_ns in zip(step.ranks, begins, strict=True):
        players.append(_Player(rank, t, own_ns, plan, costs, change))
        players[-1].compute(players[0])
    messages = []
    for bucket, times_ns in zip(plan.buckets, zip(*(its.launches_ns for its in players), strict=True), strict=True):
        latest_ns = max(times_ns) + step.adds_after_ns
        join_ns = max(max(t, min(its.complete_ns, latest_ns)) for t, its in zip(times_ns, players, strict=True))
        messages.append(Message(bucket.nbytes, (join_ns - begin_ns) / 1e9))
    arrivals = [begin_ns + round(1e9 * transfer.end_s) for transfer in simulate(messages, costs.wire)]
    return replace(step, ranks=tuple(its.played(arrivals) for its in players))


def _longer_ns(rank: RankStep, plan: BucketPlan, costs: Costs) -> float:
    """By how much backward is longer with the buckets of `plan`."""
    more = len(plan.buckets) - len(rank.plan.buckets)
    then_s, recorded_s = (sum(costs.wire.seconds(b.nbytes) for b in one.buckets) for one in (plan, rank.plan))
    crowded_ns = rank.crowded_ns * (then_s / recorded_s - 1) if recorded_s else 0.0
    return more * (rank.launch_ns + 1e9 * costs.pack.latency_s) + crowded_ns


class _Player:
    """One rank in a step that is played: `compute` first, until its gradients are complete."""

    def __init__(self, rank: RankStep, t: int, begin_ns: int, plan: BucketPlan, costs: Costs, change: Change):
        self._rank, self._begin_ns, self._plan, self._costs = rank, begin_ns, plan, costs
        self._phases = {span.begin_ns: phase for span, phase in busy(rank)}
        self._factors = {phase: change.factors.get((t, rank.rank, phase), 1.0) for phase in Phase}
        backward_ns = sum(span.length_ns for span, phase in busy(rank) if phase is Phase.BACKWARD)
        self._factors[Phase.BACKWARD] *= max(0.0, 1 + _longer_ns(rank, plan, costs) / max(1, backward_ns))
        self.recorded = [span for span in rank.spans if span.end_ns <= _complete_ns(rank)]
        self._ends_ns = [span.end_ns for span in self.recorded]
        self.spans: list[Span] = []  # these, as played

    @property
    def complete_ns(self) -> int:
        return self.spans[-1].end_ns

    def compute(self, first: _Player) -> None:
        """Play the recorded spans; those of buffers end when the `first` rank, perhaps this one, has sent them."""
        pairs = zip(first.recorded, first.spans, strict=False)  # none yet, if this is the first rank
        sendings = iter([(old.begin_ns, new.begin_ns) for old, new in pairs if old.activity is Activity.BUFFERS])
        now_ns = self._begin_ns
        for span in self.recorded:
            begins_ns, length_ns = now_ns, span.length_ns
            if (phase := self._phases.get(span.begin_ns)) is not None:
                length_ns = round(length_ns * self._factors[phase])
            elif (sending := next(sendings, None)) is not None:
                seen_ns, sent_ns = sending
                length_ns = span.end_ns - min(max(span.begin_ns, seen_ns), span.end_ns)
                begins_ns = max(now_ns, sent_ns)
            self.spans.append(replace(span, begin_ns=now_ns, end_ns=begins_ns + length_ns))
            now_ns = begins_ns + length_ns

    @cached_property
    def launches_ns(self) -> list[int]:
        """When each bucket is launched; one without gradients, when backward ends."""
        launches: list[int] = []
        now_ns = 0
        for bucket in self._plan.buckets:
            ready = [t_ns for slot in bucket.slots if (t_ns := self._rank.ready_ns.get(slot.param)) is not None]
            pack_ns = round(1e9 * self._costs.pack.seconds(bucket.nbytes))
            packed_ns = self._moved(max(ready)) + pack_ns if ready else self.complete_ns
            now_ns = max(now_ns, min(packed_ns, self.complete_ns))
            launches.append(now_ns)
        return launches

    def _moved(self, t_ns: int) -> int:
        """A recorded moment, as played."""
        place = bisect_left(self._ends_ns, t_ns)
        if place == len(self.recorded):
            return self.complete_ns
        old, new = self.recorded[place], self.spans[place]
        return new.begin_ns + round((t_ns - old.begin_ns) / max(1, old.length_ns) * new.length_ns)

    def played(self, arrivals: Sequence[int]) -> RankStep:
        """The whole step, where buckets arrive at these times."""
        spans = tuple(span for span in [*self.spans, *self._rest(arrivals)] if span.length_ns)
        return replace(
            self._rank,
            interval=Interval(self._begin_ns, spans[-1].end_ns),
            spans=spans,
            packs=(),
            ready_ns={param: self._moved(t_ns) for param, t_ns in self._rank.ready_ns.items()},
            gradients_complete_ns=self.complete_ns,
            buckets=tuple(
                BucketHistory(bucket.index, bucket.nbytes, launched_ns=launched_ns, completed_ns=arrival_ns)
                for bucket, launched_ns, arrival_ns in zip(
                    self._plan.buckets, self.launches_ns, arrivals, strict=True
                )
            ),
            plan=self._plan,
        )

    def _rest(self, arrivals: Sequence[int]) -> Iterator[Span]:
        """What follows when all gradients are complete."""
        now_ns = self.complete_ns
        for bucket, arrival_ns in zip(self._plan.buckets, arrivals, strict=True):
            waited_ns = max(now_ns, arrival_ns) + round(self._costs.wake_ns)
            copied_ns = waited_ns + round(1e9 * self._costs.copy.seconds(bucket.nbytes))
            yield Span(Activity.EXPOSED, now_ns, waited_ns, bucket.index)
            yield Span(Activity.COPY_BACK, waited_ns, copied_ns, bucket.index)
            now_ns = copied_ns
        for span, phase in busy(self._rank):
            if span.begin_ns >= _complete_ns(self._rank):
                end_ns = now_ns + round(span.length_ns * self._factors[phase])
                yield replace(span, begin_ns=now_ns, end_ns=end_ns)
                now_ns = end_ns
