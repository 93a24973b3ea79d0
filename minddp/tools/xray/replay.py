"""The recorded steps, simulated again with something changed. Pure.

[Note: how steps are simulated]
A rank computes as recorded: one span after the other, each scaled by a factor
for its phase. Its gradients are ready at their places in backward. A bucket is launched when its last
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
}
Factors = Mapping[tuple[int, int, WorkPhase], float]  # for the length of a phase, by step, rank and phase


def busy(rank: RankStep) -> list[tuple[Span, WorkPhase]]:
    """The spans in which the rank neither waits for others nor copies."""
    forwards = [span.begin_ns for span in rank.spans if span.activity is Activity.FORWARD]
    optimizers = [span.begin_ns for span in rank.spans if span.activity is Activity.OPTIMIZER]
    found = []
    for span in rank.spans:
        if span.activity in (Activity.EXPOSED, Activity.COPY_BACK, Activity.BUFFERS):
            continue
        phase = PHASE_OF.get(span.activity, WorkPhase.BETWEEN)
        if span.begin_ns < forwards[-1] and span.activity in (Activity.LOSS, Activity.BACKWARD, Activity.OTHER):
            phase = WorkPhase.ACCUMULATION
        elif phase is WorkPhase.BETWEEN and rank.gradients_complete_ns <= span.begin_ns < max(
            optimizers, default=0
        ):
            phase = WorkPhase.OPTIMIZER
        found.append((span, phase))
    return found


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
    """Fitted to all buckets. None if no message was seen to complete."""
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
    def arrival_ns(self) -> int:
        return max((wire.end_ns for wire in self.wires), default=min(rank.begin_ns for rank in self.ranks))


class Replay(NamedTuple):
    """The simulated steps in order, and their mean length. See [Note: how steps are simulated]."""

    steps: list[SimulatedStep]
    step_ns: float


def replay(
    steps: Sequence[RecordedStep], costs: Costs, plan: BucketPlan | None = None, factors: Factors | None = None
) -> Replay:
    """All `steps`, which must have the same ranks, with these costs, with other buckets, and with `factors`."""
    begins = [rank.interval.begin_ns for rank in steps[0].ranks]
    simulated = []
    for t, step in [(0, steps[0]), *enumerate(steps)]:
        of_ranks = [
            {phase: (factors or {}).get((t, rank.rank, phase), 1.0) for phase in WorkPhase} for rank in step.ranks
        ]
        simulated.append(_simulated(step, begins, costs, plan or step.plan, of_ranks))
        begins = [rank.end_ns for rank in simulated[-1].ranks]
    return Replay(simulated[1:], (simulated[-1].arrival_ns - simulated[0].arrival_ns) / len(steps))


def _simulated(
    step: RecordedStep,
    begins: Sequence[int],
    costs: Costs,
    plan: BucketPlan,
    factors: Sequence[Mapping[WorkPhase, float]],
) -> SimulatedStep:
    begin_ns = min(begins)
    players: list[_Player] = []
    for rank, own_ns, of_rank in zip(step.ranks, begins, factors, strict=True):
        players.append(_Player(rank, own_ns, plan, costs, of_rank, players[0].computed if players else []))
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


class _Player:
    """One rank in a simulated step. `first` are the spans of the first rank, which sends the buffers."""

    def __init__(
        self,
        rank: RankStep,
        begin_ns: int,
        plan: BucketPlan,
        costs: Costs,
        factors: Mapping[WorkPhase, float],
        first: Sequence[tuple[Span, Interval]],
    ):
        self._rank, self._begin_ns, self._plan, self._costs = rank, begin_ns, plan, costs
        self._busy = busy(rank)
        self._factors = {**factors, WorkPhase.BACKWARD: factors[WorkPhase.BACKWARD] * self._longer()}
        # The spans until the gradients are complete, with their simulated times
        self.computed = list(self._until_complete(first))
        self.complete_ns = self.computed[-1][1].end_ns
        self.launches_ns = list(self._launches())

    def _longer(self) -> float:
        """The length of backward with these buckets, as a multiple of the recorded one."""
        recorded, wire = self._rank.plan.buckets, self._costs.wire
        more = len(self._plan.buckets) - len(recorded)
        then_s, recorded_s = (sum(wire.seconds(b.nbytes) for b in one) for one in (self._plan.buckets, recorded))
        crowded_ns = self._rank.crowded_ns * (then_s / recorded_s - 1) if recorded_s else 0.0
        longer_ns = more * (self._rank.launch_ns + 1e9 * self._costs.pack.latency_s) + crowded_ns
        backward_ns = sum(span.length_ns for span, phase in self._busy if phase is WorkPhase.BACKWARD)
        return max(0.0, 1 + longer_ns / max(1, backward_ns))

    def _until_complete(self, first: Sequence[tuple[Span, Interval]]) -> Iterator[tuple[Span, Interval]]:
        phases = {span.begin_ns: phase for span, phase in self._busy}
        now_ns = self._begin_ns
        sendings = iter([(old, new) for old, new in first if old.activity is Activity.BUFFERS])
        for span in self._rank.spans:
            if span.end_ns > self._rank.gradients_complete_ns:
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
        place = bisect_left(self.computed, t_ns, key=lambda pair: pair[0].end_ns)
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
            if span.begin_ns >= self._rank.gradients_complete_ns:
                now_ns += round(span.length_ns * self._factors[phase])
        return SimulatedRank(self._begin_ns, self.launches_ns, self.complete_ns, exposed_ns, now_ns)
