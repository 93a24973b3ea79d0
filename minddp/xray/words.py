"""What a step says, in plain sentences: shared by the terminal, the page and the picture. Pure.

Names of parameters stand in backticks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minddp.xray.analysis import Analysis
from minddp.xray.causes import Cause, Wait, total_by_cause, worst_wait
from minddp.xray.intervals import Interval
from minddp.xray.plans import Alternative
from minddp.xray.timeline import Activity, BucketHistory, RankStep, Step

NEGLIGIBLE = 0.01  # of a step: nobody should change a program for that


def ms(ns: float) -> str:
    """A duration, with as many digits as tell something."""
    value = ns / 1e6
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} ms"


def size(nbytes: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            value = nbytes / factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def plural_ranks(ranks: Sequence[int]) -> str:
    names = [str(rank) for rank in ranks]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


# ---------------------------------------------------------------------- the step as a whole


def headline(step: Step) -> str:
    """The step in one sentence."""
    slowest = max(step.ranks, key=lambda rank: rank.parts_ns[Activity.EXPOSED])
    waited_ns = slowest.parts_ns[Activity.EXPOSED]
    took = f"A step takes {ms(step.length_ns)}"
    if not step.complete:
        return f"This step did not come to its end: it was cut short after {ms(step.length_ns)}."
    if waited_ns < NEGLIGIBLE * step.length_ns:
        return f"{took}, and hardly any of it is spent waiting for gradients."
    return f"{took}, of which rank {slowest.rank} waits {ms(waited_ns)} for gradients."


def overlap_sentence(step: Step) -> str:
    """How much of the communication is hidden, rank by rank where they differ."""
    shares = {rank.rank: step.overlap(rank) for rank in step.ranks}
    least, most = min(shares, key=lambda rank: shares[rank]), max(shares, key=lambda rank: shares[rank])
    if shares[most] - shares[least] < 0.03:
        return f"{percent(shares[least])} of the communication is hidden behind computation."
    return (
        f"Of the communication, {percent(shares[least])} is hidden behind computation on rank {least}, and "
        f"{percent(shares[most])} on rank {most}."
    )


def worst_sentence(step: Step) -> str:
    """The bucket that hurts most, and why."""
    wait = worst_wait(step)
    if wait is None or wait.length_ns < NEGLIGIBLE / 2 * step.length_ns:
        return "No bucket is waited for noticeably."
    rank = _rank(step, wait.rank)
    return (
        f"Bucket {wait.bucket} hurts most: rank {wait.rank} stands still for it for {ms(wait.length_ns)}, "
        f"{why(step, rank, wait)}."
    )


def why(step: Step, rank: RankStep, wait: Wait) -> str:
    """The main cause of a wait, as the end of a sentence."""
    bucket, cause = rank.buckets[wait.bucket], wait.main_cause
    share_ns = wait.ns_by_cause[cause]
    if cause is Cause.OTHER_RANK:
        last = step.last_launch(wait.bucket)
        assert last is not None, "that cause is only known from the last launch"
        return f"{ms(share_ns)} of that because rank {last[1]} launches it later"
    if cause is Cause.EARLIER_BUCKET:
        return f"{ms(share_ns)} of that because bucket {wait.bucket - 1} is still on the wire"
    if cause is Cause.WIRE:
        return f"{ms(share_ns)} of that while its {size(bucket.nbytes)} are on the wire: {_time_left(step, rank, bucket)}"
    if cause is Cause.WAKING:
        return f"{ms(share_ns)} of that after it has arrived: the rank did not get a core, or was in other code"
    return "for agreements that are not about one bucket"


def _time_left(step: Step, rank: RankStep, bucket: BucketHistory) -> str:
    """How much of backward was left to hide a bucket behind."""
    wire, name = step.on_the_wire(bucket.index, rank), _name(rank, bucket.last_param)
    left_ns = 0 if wire is None else bucket.hidden_ns(wire)
    if left_ns < 0.05 * max(bucket.awaited_ns, 1):
        return f"when its last gradient arrives, that of {name}, nothing is left of backward to hide it behind"
    return f"when they begin to move, {ms(left_ns)} are left of backward to hide them behind"


def suggestion(step: Step, plans: Sequence[Alternative]) -> str:
    """One concrete thing to do, with what it should gain; or that there is nothing to do."""
    exposed_ns = max(rank.parts_ns[Activity.EXPOSED] for rank in step.ranks)
    if exposed_ns < NEGLIGIBLE * step.length_ns:
        return "Leave the plan as it is: there is hardly anything left to hide."
    late = _straggler(step)
    if late is not None:
        return late
    gains = [(plans[0].prediction.length_ns - other.prediction.length_ns, other) for other in plans[1:]]
    gain_ns, best = max(gains, key=lambda gain: gain[0], default=(0, None))
    if best is None or gain_ns < NEGLIGIBLE * step.length_ns:
        return (
            "Other bucket sizes would gain less than 1%. What is left is the communication itself: fewer bytes (a "
            "compressing hook), fewer steps (`no_sync` over several batches), or a faster wire."
        )
    buckets, now = len(best.prediction.layout.buckets), len(step.layout.buckets)
    instead = "cut elsewhere" if buckets == now else f"instead of {now}"
    return (
        f"Pass `{shortened(best.code)}`. " if best.code else "Pass no bucket sizes: the default is better. "
    ) + (
        f"Predicted: {ms(gain_ns)} less a step ({percent(gain_ns / step.length_ns)}), with "
        f"{count(buckets, 'bucket')} {instead}."
    )


def model_sentence(analysis: Analysis) -> str:
    """What the predictions rest on, and how far to trust them."""
    cost, step = analysis.cost, analysis.typical
    assert cost is not None, "without messages there are no predictions"
    predicted = analysis.plans[0].prediction.length_ns
    latency = f"{1e3 * cost.latency_s:.2g} ms + " if cost.separates_latency else ""
    caveat = (
        ""
        if cost.separates_latency
        else " All messages have one size, so their latency is not known: do not trust plans with more buckets."
    )
    return (
        f"The model: a message takes {latency}its bytes at {size(cost.bytes_per_s)} a second, fitted to "
        f"{count(cost.messages, 'message')}; gradients become ready as recorded. For the recorded plan it says "
        f"{ms(predicted)}, recorded were {ms(step.length_ns)}.{caveat}"
    )


def shortened(code: str, most: int = 90) -> str:
    """A list of many capacities says little: its beginning is enough to see what it is."""
    return code if len(code) <= most else code[: most - 6].rsplit(",", 1)[0] + ", ...]"


def _straggler(step: Step) -> str | None:
    """Waiting for ranks that come later, if that is most of the waiting."""
    total = {rank.rank: total_by_cause(step, rank) for rank in step.ranks}
    waits = {rank: causes[Cause.OTHER_RANK] for rank, causes in total.items()}
    patient = max(waits, key=lambda rank: waits[rank])
    if waits[patient] < 0.5 * sum(total[patient].values()):
        return None
    last = step.last_launch(len(step.layout.buckets) - 1)
    late = last[1] if last is not None else patient
    return (
        f"Balance the ranks: rank {late} is last to finish backward, and rank {patient} waits {ms(waits[patient])} for "
        f"it. Other buckets cannot help; equal batches, equal input pipelines and a core or GPU for each rank can, by "
        f"up to {ms(waits[patient])} a step."
    )


# ---------------------------------------------------------------------- one bucket


@dataclass(frozen=True)
class Stage:
    """A part of a bucket's life: from when to when, and what it is, in a word and in a sentence."""

    name: str
    begin_ns: int
    end_ns: int
    sentence: str


def life_of(step: Step, rank: RankStep, bucket: BucketHistory) -> list[Stage]:
    """A bucket's life on one rank, stage by stage; those that did not come to pass are left out."""
    return [stage for stage in _stages(step, rank, bucket) if stage.end_ns >= stage.begin_ns]


def _stages(step: Step, rank: RankStep, bucket: BucketHistory) -> list[Stage]:
    stages = []
    parameters = len(rank.layout.buckets[bucket.index].params)
    if bucket.first_gradient_ns is not None and bucket.last_gradient_ns is not None:
        took = ms(bucket.last_gradient_ns - bucket.first_gradient_ns)
        sentence = (
            f"{count(parameters, 'gradient')} within {took}; the last is {_name(rank, bucket.last_param)}."
            if parameters > 1
            else f"Its only gradient is {_name(rank, bucket.last_param)}."
        )
        stages.append(Stage("fills", bucket.first_gradient_ns, bucket.last_gradient_ns, sentence))
    if bucket.ready_ns is None or bucket.launched_ns is None:
        return stages
    stages.append(Stage("held", bucket.ready_ns, bucket.launched_ns, _held_sentence(bucket)))
    last, wire = step.last_launch(bucket.index), step.on_the_wire(bucket.index, rank)
    if last is not None:
        stages.append(Stage("waits for ranks", bucket.launched_ns, last[0], _ranks_sentence(rank, last, bucket)))
    if wire is None:
        return stages
    queues_from_ns = bucket.launched_ns if last is None else last[0]
    if wire.begin_ns > queues_from_ns:
        sentence = f"Bucket {bucket.index - 1} is still on the wire for {ms(wire.begin_ns - queues_from_ns)}."
        stages.append(Stage("queues", queues_from_ns, wire.begin_ns, sentence))
    stages.append(Stage("on the wire", *wire, _wire_sentence(bucket, wire)))
    return stages


def _held_sentence(bucket: BucketHistory) -> str:
    if bucket.held_ns < 50_000:
        return "It leaves at once: all buckets before it have gone."
    return f"It is ready, but for {ms(bucket.held_ns)} a bucket before it is not: buckets leave in plan order."


def _ranks_sentence(rank: RankStep, last: tuple[int, int], bucket: BucketHistory) -> str:
    assert bucket.launched_ns is not None
    if last[1] == rank.rank or last[0] - bucket.launched_ns < 50_000:
        return (
            "All ranks are there: the sum can begin."
            if last[1] != rank.rank
            else "This rank is the last to launch it."
        )
    return (
        f"Rank {last[1]} launches it {ms(last[0] - bucket.launched_ns)} later; until then nothing can be added up."
    )


def _wire_sentence(bucket: BucketHistory, wire: Interval) -> str:
    took_ns = max(1, wire.length_ns)
    seen = "" if bucket.completion_was_seen else " at most (its completion was not seen)"
    return f"{size(bucket.nbytes)} in {ms(took_ns)}{seen}: {size(bucket.nbytes / took_ns * 1e9)} a second."


def hidden_sentence(step: Step, rank: RankStep, bucket: BucketHistory) -> str:
    """How much of a bucket's communication was hidden, and how long the rank stood still for it."""
    wire = step.on_the_wire(bucket.index, rank)
    if wire is None:
        return "It was never through."
    hidden_ns = bucket.hidden_ns(wire)
    stood_still = f"The rank stood still for it for {ms(bucket.awaited_ns)}." if bucket.awaited_ns > 50_000 else ""
    if wire.length_ns - hidden_ns < 0.01 * wire.length_ns:
        return f"All of its communication is hidden behind backward. {stood_still}".rstrip()
    return (
        f"Of its communication {ms(hidden_ns)} are hidden behind backward, {ms(wire.length_ns - hidden_ns)} are not. "
        f"{stood_still}".rstrip()
    )


def _name(rank: RankStep, param: int | None) -> str:
    return "an unknown parameter" if param is None else f"`{rank.layout.params[param].name}`"


def _rank(step: Step, number: int) -> RankStep:
    return next(rank for rank in step.ranks if rank.rank == number)
