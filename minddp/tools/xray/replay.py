"""The recorded steps, simulated again with something changed. Pure.

[Note: how steps are simulated]
A rank computes as recorded: one span after the other, each scaled by a factor
(`Change.factors`). Its gradients are ready at their places in backward. A bucket is launched when its last
gradient is packed and all buckets before it are launched. When all ranks have joined (see `timeline.py`) it
travels, one at a time, by the model of `tools/forecast/step_model.py`. After backward a rank waits for each bucket
and copies it back, then continues as recorded. Its next step begins when it is done, so a rank that is late in any
phase makes the others wait in the next backward. Buffers make ranks wait, too: no rank has them before rank 0
sends them.

The costs of a message, of packing and of copying are fitted to the recording (`Costs`). A launch costs the
training thread the recorded time. The time for which backward waits for cores is proportional to that of all
messages: see [Note: core time]. Not modelled: small messages may travel side by side. Simulating the recording
unchanged shows the error of the model.

A step is measured from one last arrival to the next. One more step, equal to the first, is simulated before it.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from minddp.core.plan import BucketPlan
from minddp.tools.forecast.lateness import WorkPhase
from minddp.tools.forecast.link import FREE, Link, fit_link
from minddp.tools.forecast.step_model import Message, simulate
from minddp.tools.xray.timeline import Activity, Interval, RankStep, RecordedStep, Span

SIZES_APART = 2  # times as large: nearer ones do not show a latency


PHASE_OF = {
    Activity.FORWARD: WorkPhase.FORWARD,
    Activity.LOSS: WorkPhase.LOSS,
    Activity.BACKWARD: WorkPhase.BACKWARD,
    Activity.OPTIMIZER: WorkPhase.OPTIMIZER,
    Activity.DATA: WorkPhase.DATA,
}


def busy(rank: RankStep) -> list[tuple[Span, WorkPhase]]:
    """The spans of a complete step in which the rank neither waits for others nor copies."""
    complete_ns = _complete_ns(rank)
    forwards = [span.begin_ns for span in rank.spans if span.activity is Activity.FORWARD]
    optimizers = [span.begin_ns for span in rank.spans if span.activity is Activity.OPTIMIZER]
    found = []
    for span in rank.spans:
        if span.activity in (Activity.EXPOSED, Activity.COPY_BACK, Activity.BUFFERS):
            continue
        phase = PHASE_OF.get(span.activity, WorkPhase.BETWEEN)
        if span.begin_ns < forwards[-1] and span.activity in (Activity.LOSS, Activity.BACKWARD, Activity.OTHER):
            phase = WorkPhase.ACCUMULATION
        elif phase is WorkPhase.BETWEEN and complete_ns <= span.begin_ns < max(optimizers, default=0):
            phase = WorkPhase.OPTIMIZER
        found.append((span, phase))
    return found


def _complete_ns(rank: RankStep) -> int:
    complete_ns = rank.gradients_complete_ns
    assert complete_ns is not None, "a complete step has the end of its backward"
    return complete_ns


# ---------------------------------------------------------------------- costs, fitted to the recording


@dataclass(frozen=True)
class Costs:
    """The costs by bytes of a message on the link, of packing and of copying back; and the number of messages.

    A rank continues `wake_ns` after an arrival.
    """

    wire: Link
    messages: int
    pack: Link = FREE
    copy: Link = FREE
    wake_ns: float = 0.0


def costs_of(steps: Sequence[RecordedStep]) -> Costs | None:
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
    )


def _as_long_in_all(link: Link, steps: Sequence[RecordedStep]) -> Link:
    """Scale the link so that the messages of the median backward take as long in total as recorded.

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
    def link(self) -> Link | None:
        """The link that best explains the median time of each size. Similar sizes show no latency: then it is 0."""
        medians = {nbytes: statistics.median(times) for nbytes, times in self.items()}
        if medians and max(medians) >= SIZES_APART * min(medians):
            return fit_link(medians)
        return Link(0.0, sum(medians) / sum(medians.values())) if medians else None


# ---------------------------------------------------------------------- the simulation


@dataclass(frozen=True)
class Change:
    """A difference: other buckets, other costs, and factors for the length of a phase, by step, rank and phase.

    `title` says it in words, `code` as arguments or calls; `ranks` are those that become quicker.
    """

    plan: BucketPlan | None = None
    costs: Callable[[Costs], Costs] = lambda costs: costs
    factors: Mapping[tuple[int, int, WorkPhase], float] = field(default_factory=dict)
    title: str = "as recorded"
    code: str = ""
    ranks: tuple[int, ...] = ()


class SimulatedRank(NamedTuple):
    """The times of one rank in a simulated step. It is blocked for `exposed_ns`."""

    begin_ns: int
    launches_ns: list[int]
    complete_ns: int
    exposed_ns: int
    end_ns: int


class SimulatedStep(NamedTuple):
    """A simulated step: its ranks, and for each bucket when its bytes move."""

    ranks: list[SimulatedRank]
    wires: list[Interval]

    @property
    def length_ns(self) -> int:
        return max(rank.end_ns - rank.begin_ns for rank in self.ranks)

    @property
    def exposed_ns(self) -> int:
        """The cost of communication: see `timeline.py`."""
        return max(self.ranks, key=lambda rank: rank.complete_ns).exposed_ns

    @property
    def arrival_ns(self) -> int:
        return max((wire.end_ns for wire in self.wires), default=min(rank.begin_ns for rank in self.ranks))


class Replay(NamedTuple):
    """The simulated steps in order, and their mean length. See [Note: how steps are simulated]."""

    steps: list[SimulatedStep]
    step_ns: float


def replay(steps: Sequence[RecordedStep], costs: Costs, change: Change = Change()) -> Replay:
    """All `steps`, which must be complete and have the same plan and ranks, with one `change`."""
    costs = change.costs(costs)
    begins = [rank.interval.begin_ns for rank in steps[0].ranks]
    simulated = []
    for t, step in [(0, steps[0]), *enumerate(steps)]:
        simulated.append(_simulated(step, t, begins, costs, change))
        begins = [rank.end_ns for rank in simulated[-1].ranks]
    return Replay(simulated[1:], (simulated[-1].arrival_ns - simulated[0].arrival_ns) / len(steps))


def _simulated(step: RecordedStep, t: int, begins: Sequence[int], costs: Costs, change: Change) -> SimulatedStep:
    plan, begin_ns = change.plan or step.plan, min(begins)
    players: list[_Player] = []
    for rank, own_ns in zip(step.ranks, begins, strict=True):
        players.append(_Player(rank, t, own_ns, plan, costs, change, players[0].computed if players else []))
    messages = []
    for bucket, times_ns in zip(plan.buckets, zip(*(its.launches_ns for its in players), strict=True), strict=True):
        latest_ns = max(times_ns) + step.adds_after_ns
        join_ns = max(max(t, min(its.complete_ns, latest_ns)) for t, its in zip(times_ns, players, strict=True))
        messages.append(Message(bucket.nbytes, (join_ns - begin_ns) / 1e9))
    wires = [
        Interval(*(begin_ns + round(1e9 * at_s) for at_s in transfer))
        for transfer in simulate(messages, costs.wire)
    ]
    return SimulatedStep([its.after_backward(wires) for its in players], wires)


def _longer_ns(rank: RankStep, plan: BucketPlan, costs: Costs) -> float:
    """By how much backward is longer with the buckets of `plan`."""
    more = len(plan.buckets) - len(rank.plan.buckets)
    then_s, recorded_s = (sum(costs.wire.seconds(b.nbytes) for b in one.buckets) for one in (plan, rank.plan))
    crowded_ns = rank.crowded_ns * (then_s / recorded_s - 1) if recorded_s else 0.0
    return more * (rank.launch_ns + 1e9 * costs.pack.latency_s) + crowded_ns


class _Player:
    """One rank in a simulated step. `first` are the spans of the first rank, which sends the buffers."""

    def __init__(
        self,
        rank: RankStep,
        t: int,
        begin_ns: int,
        plan: BucketPlan,
        costs: Costs,
        change: Change,
        first: Sequence[tuple[Span, Interval]],
    ):
        self._rank, self._begin_ns, self._plan, self._costs = rank, begin_ns, plan, costs
        self._busy = busy(rank)
        self._factors = {phase: change.factors.get((t, rank.rank, phase), 1.0) for phase in WorkPhase}
        backward_ns = sum(span.length_ns for span, phase in self._busy if phase is WorkPhase.BACKWARD)
        self._factors[WorkPhase.BACKWARD] *= max(0.0, 1 + _longer_ns(rank, plan, costs) / max(1, backward_ns))
        self.computed = list(self._until_complete(first))  # spans until the gradients are complete, and their times
        self._ends_ns = [span.end_ns for span, _ in self.computed]
        self.complete_ns = self.computed[-1][1].end_ns
        self.launches_ns = list(self._launches())

    def _until_complete(self, first: Sequence[tuple[Span, Interval]]) -> Iterator[tuple[Span, Interval]]:
        phases = {span.begin_ns: phase for span, phase in self._busy}
        sendings = iter([(old, new) for old, new in first if old.activity is Activity.BUFFERS])
        now_ns = self._begin_ns
        for span in self._rank.spans:
            if span.end_ns > _complete_ns(self._rank):
                return
            begin_ns, length_ns = now_ns, span.length_ns
            if (phase := phases.get(span.begin_ns)) is not None:
                length_ns = round(length_ns * self._factors[phase])
            elif (sending := next(sendings, None)) is not None:
                recorded, simulated = sending
                length_ns = span.end_ns - min(max(span.begin_ns, recorded.begin_ns), span.end_ns)
                begin_ns = max(now_ns, simulated.begin_ns)
            yield span, Interval(now_ns, begin_ns + length_ns)
            now_ns = begin_ns + length_ns

    def _launches(self) -> Iterator[int]:
        """The launch of each bucket; without gradients it is the end of backward."""
        now_ns = 0
        for bucket in self._plan.buckets:
            ready = [t_ns for slot in bucket.slots if (t_ns := self._rank.ready_ns.get(slot.param)) is not None]
            pack_ns = round(1e9 * self._costs.pack.seconds(bucket.nbytes))
            packed_ns = self._simulated_ns(max(ready)) + pack_ns if ready else self.complete_ns
            now_ns = max(now_ns, min(packed_ns, self.complete_ns))
            yield now_ns

    def _simulated_ns(self, t_ns: int) -> int:
        """The simulated time of a recorded moment."""
        place = bisect_left(self._ends_ns, t_ns)
        if place == len(self.computed):
            return self.complete_ns
        old, new = self.computed[place]
        return new.begin_ns + round((t_ns - old.begin_ns) / max(1, old.length_ns) * new.length_ns)

    def after_backward(self, wires: Sequence[Interval]) -> SimulatedRank:
        """Wait for each bucket, copy it back, and continue as recorded."""
        now_ns, exposed_ns = self.complete_ns, 0
        for bucket, wire in zip(self._plan.buckets, wires, strict=True):
            waited_ns = max(now_ns, wire.end_ns) + round(self._costs.wake_ns)
            exposed_ns += waited_ns - now_ns
            now_ns = waited_ns + round(1e9 * self._costs.copy.seconds(bucket.nbytes))
        for span, phase in self._busy:
            if span.begin_ns >= _complete_ns(self._rank):
                now_ns += round(span.length_ns * self._factors[phase])
        return SimulatedRank(self._begin_ns, self.launches_ns, self.complete_ns, exposed_ns, now_ns)
