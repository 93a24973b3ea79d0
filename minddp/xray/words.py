"""A step in plain sentences, for the terminal, the page and the picture. Pure.

Names of parameters stand in backticks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minddp.platform.wording import count, size
from minddp.platform.wording import ranks as listed_ranks
from minddp.xray.analysis import Analysis
from minddp.xray.intervals import Interval
from minddp.xray.recording import Recording
from minddp.xray.timeline import Activity, BucketHistory, RankStep, Step
from minddp.xray.waits import Cause, Wait, total_by_cause, worst_wait

NEGLIGIBLE = 0.01  # of a step: too little to change a program for
NOTABLE_NS = 50_000  # shorter waits are not mentioned


def ms(ns: float) -> str:
    """A duration, with three digits at most."""
    value = ns / 1e6
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} ms"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


# ---------------------------------------------------------------------- the step as a whole


def headline(step: Step) -> str:
    """The step in one sentence."""
    slowest = max(step.ranks, key=lambda rank: rank.parts_ns[Activity.EXPOSED])
    waited_ns = slowest.parts_ns[Activity.EXPOSED]
    took = f"A step takes {ms(step.length_ns)}"
    if not step.complete:
        return f"This step did not come to its end: it stopped after {ms(step.length_ns)}."
    if waited_ns < NEGLIGIBLE * step.length_ns:
        return f"{took}, and hardly any of it is spent waiting for gradients."
    return f"{took}; rank {slowest.rank} waits {ms(waited_ns)} of it for gradients."


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
    """The bucket for which a rank waits longest, and why."""
    wait = worst_wait(step)
    if wait is None or wait.length_ns < NEGLIGIBLE / 2 * step.length_ns:
        return "No rank stands still for a bucket for a notable time."
    still = f"rank {wait.rank.rank} stands still for {ms(wait.length_ns)}"
    return f"Bucket {wait.bucket} costs most: {still} {_why(step, wait)}"


def _why(step: Step, wait: Wait) -> str:
    """The main cause of a wait, as the end of a sentence, and its reason, as another."""
    rank, cause = wait.rank, wait.main_cause
    bucket = rank.buckets[wait.bucket]
    share_ns = wait.ns_by_cause[cause]
    part = "" if share_ns > 0.9 * wait.length_ns else f"for it, {ms(share_ns)} of that "
    if cause is Cause.OTHER_RANK:
        last = step.last_launch(wait.bucket)
        assert last is not None, "that cause is only known from the last launch"
        return f"{part}until rank {last[1]} launches it, too."
    if cause is Cause.EARLIER_BUCKET:
        return f"{part}while bucket {wait.bucket - 1} is still on the wire."
    if cause is Cause.WIRE:
        return f"{part}while its {size(bucket.nbytes)} are on the wire. {_reason_for_late_wire(step, rank, bucket)}"
    if cause is Cause.WAKING:
        return f"{part}after it has arrived: the thread had no core, or was in other code."
    return f"{part}for agreements that are not about one bucket."


def _reason_for_late_wire(step: Step, rank: RankStep, bucket: BucketHistory) -> str:
    """The reason why a bucket's bytes begin to move when little is left of backward to hide them."""
    wire, last = step.on_the_wire(bucket.index, rank), step.last_launch(bucket.index)
    assert wire is not None, "that cause is only known from the wire"
    left_ns = bucket.hidden_ns(wire)
    when = f"{ms(left_ns)} before backward ends" if left_ns > 0.02 * wire.length_ns else "backward is over"
    if wire.begin_ns > (bucket.launched_ns or 0) and (last is None or wire.begin_ns > last[0]):
        return f"Until {when}, the wire is busy with the buckets before it."
    if last is not None and last[1] != rank.rank and last[0] - (bucket.launched_ns or 0) > 0.1 * bucket.awaited_ns:
        return f"It can only begin when rank {last[1]} launches it: {when}."
    when = when if left_ns > 0.02 * wire.length_ns else "when backward ends"
    return f"Its last gradient, that of {_name(rank, bucket.last_param)}, arrives {when}."


def suggestion(analysis: Analysis) -> str:
    """One concrete thing to do and its predicted gain, or that there is nothing to do."""
    step = analysis.typical
    if max(rank.parts_ns[Activity.EXPOSED] for rank in step.ranks) < NEGLIGIBLE * step.length_ns:
        return "Leave the plan as it is: there is hardly anything left to hide."
    if _mostly_waits_for_ranks(step):
        return _balance(analysis)
    best = analysis.best_plan
    gain_ns = analysis.plans[0].prediction.length_ns - best.prediction.length_ns if best else 0
    if best is None or gain_ns < NEGLIGIBLE * step.length_ns:
        return (
            "Other bucket sizes would gain less than 1%. What is left is the communication itself: fewer bytes (a "
            "compressing hook), fewer steps (`no_sync` over several batches), or a faster wire."
        )
    buckets, now = len(best.prediction.layout.buckets), len(step.layout.buckets)
    what = f"Pass `{best.code}`." if best.code else "Pass no bucket sizes: the default is better."
    instead = "with other borders" if buckets == now else f"instead of {now}"
    gain = f"{ms(gain_ns)} less a step ({percent(gain_ns / step.length_ns)})"
    return f"{what} Predicted: {gain}, with {count(buckets, 'bucket')} {instead}."


def model_sentence(analysis: Analysis) -> str:
    """The model behind the predictions, and its error for the recorded plan."""
    fit, step = analysis.fit, analysis.typical
    assert fit is not None, "without messages there are no predictions"
    predicted_ns = analysis.plans[0].prediction.length_ns
    latency = f"{1e3 * fit.link.latency_s:.2g} ms + " if fit.link.latency_s > 1e-6 else ""
    caveat = (
        ""
        if fit.separates_latency
        else " All messages have one size, so their latency is not known: do not trust plans with more buckets."
    )
    return (
        f"The model: a message takes {latency}its bytes at {size(fit.link.bytes_per_s)} a second, fitted to "
        f"{count(fit.messages, 'message')}; gradients become ready as recorded. For the recorded plan it says "
        f"{ms(predicted_ns)}, recorded were {ms(step.length_ns)}.{caveat}"
    )


def more_ranks_sentence(analysis: Analysis) -> str:
    """The predicted step with more ranks; empty where that cannot be predicted."""
    predicted = analysis.with_other_ranks
    lengths = ", ".join(f"{ms(step.length_ns)} with {number}" for number, step in predicted.items())
    return f"With more ranks in a ring of the same wires, a step is predicted to take {lengths}." if lengths else ""


def _mostly_waits_for_ranks(step: Step) -> bool:
    totals = [total_by_cause(step, rank) for rank in step.ranks]
    most = max(totals, key=lambda total: total[Cause.OTHER_RANK])
    return most[Cause.OTHER_RANK] > 0.5 * sum(most.values())


def _balance(analysis: Analysis) -> str:
    """What to do about ranks that wait for each other, by whether the same rank is always late."""
    step = analysis.typical
    late = [last[1] for s in analysis.steps if s.complete and (last := s.last_launch(len(s.layout.buckets) - 1))]
    often = max(set(late), key=late.count)
    waits_ns = max(total_by_cause(step, rank)[Cause.OTHER_RANK] for rank in step.ranks)
    gain = f"Other buckets cannot help. Predicted: up to {ms(waits_ns)} less a step"
    if late.count(often) > 0.75 * len(late):
        return (
            f"Balance the ranks: rank {often} is the last to finish backward in {late.count(often)} of "
            f"{count(len(late), 'step')}, and the others wait. {gain} if all have equally much to do and equally "
            f"much to do it with."
        )
    return (
        f"Look for what delays now one rank and now another: a shared machine, inputs of uneven length, the "
        f"garbage collector. {gain} without it."
    )


# ---------------------------------------------------------------------- the recording


def names(recordings: Sequence[Recording]) -> list[str]:
    """Names of recordings side by side: by title; where that is not enough, by wrapper; then by number."""
    titles = [recording.title for recording in recordings]
    if len(set(titles)) < len(titles):
        pairs = zip(titles, [recording.wrapper for recording in recordings], strict=True)
        titles = [title if wrapper in title else f"{title} under {wrapper}" for title, wrapper in pairs]
    return [
        name if titles.count(name) == 1 else f"{name} ({1 + titles[:k].count(name)})"
        for k, name in enumerate(titles)
    ]


def setting(recordings: Sequence[Recording]) -> str:
    """One line on what was recorded and where. For several recordings only where, as each has its name."""
    places = list(dict.fromkeys(map(_place, recordings)))
    if len(recordings) > 1:
        return "; ".join(places)
    (recording,) = recordings
    what = [recording.title] if recording.wrapper in recording.title else [recording.title, recording.wrapper]
    return ", ".join([*what, *places])


def _place(recording: Recording) -> str:
    first = recording.ranks[0]
    device = "CPU" if first.device == "cpu" else first.device
    return f"{count(recording.world_size, 'rank')} on {device}, {first.backend}"


def facts(recording: Recording) -> list[str]:
    """Sentences about the recording itself."""
    hosts = sorted({rank.host for rank in recording.ranks})
    sentences = [f"Recorded on {listed_ranks([rank.rank for rank in recording.ranks])} ({', '.join(hosts)})."]
    if len(recording.ranks) > 1:
        sentences.append(_clock_fact(recording.clock_error_ns))
    dropped = sum(rank.dropped for rank in recording.ranks)
    kept = sum(len(rank.events) for rank in recording.ranks)
    sentences.append(
        f"{kept:,} events; none dropped."
        if not dropped
        else f"{kept:,} events; the {dropped:,} oldest did not fit the ring of {recording.ranks[0].capacity:,}."
    )
    sentences += [f"Rank {rank.rank} ended with {rank.error}" for rank in recording.ranks if rank.error]
    return sentences + list(recording.notes)


def _clock_fact(error_ns: int | None) -> str:
    if error_ns is None:
        return "The ranks' clocks were not compared: times of different ranks may be apart."
    if error_ns == 0:
        return "All ranks read one clock."
    return f"The ranks' clocks agree within {ms(error_ns)}."


# ---------------------------------------------------------------------- one bucket


@dataclass(frozen=True)
class Stage:
    """A part of a bucket's life: its name, its begin and end, and what it is, in a sentence."""

    name: str
    begin_ns: int
    end_ns: int
    sentence: str


def life_of(step: Step, rank: RankStep, bucket: BucketHistory) -> list[Stage]:
    """A bucket's life on one rank, stage by stage, without those that did not happen."""
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
    passage = step.passage(bucket.index, rank)
    assert passage is not None, "it was launched"
    if passage.queues.length_ns:
        sentence = f"Bucket {bucket.index - 1} is still on the wire for {ms(passage.queues.length_ns)}."
        stages.append(Stage("queues", *passage.queues, sentence))
    if passage.wire is None:
        sentence = "It never arrived: what the other ranks did with it is not known."
        return [*stages, Stage("waits for ranks", *passage.waits_for_ranks, sentence)]
    last = step.last_launch(bucket.index)
    if last is not None:
        sentence = _ranks_sentence(rank, last[1], passage.waits_for_ranks)
        stages.append(Stage("waits for ranks", *passage.waits_for_ranks, sentence))
    stages.append(Stage("on the wire", *passage.wire, _wire_sentence(bucket, passage.wire)))
    return stages


def _held_sentence(bucket: BucketHistory) -> str:
    if bucket.held_ns < NOTABLE_NS:
        return "It leaves at once: all buckets before it have gone."
    return f"It is ready, but for {ms(bucket.held_ns)} a bucket before it is not: buckets leave in plan order."


def _ranks_sentence(rank: RankStep, last_rank: int, waits: Interval) -> str:
    if last_rank == rank.rank:
        return "This rank is the last to launch it."
    if waits.length_ns < NOTABLE_NS:
        return "All ranks are there: the sum can begin."
    late = ms(waits.length_ns)
    return f"The wire is free, but rank {last_rank} launches it {late} later: until then nothing can be added up."


def _wire_sentence(bucket: BucketHistory, wire: Interval) -> str:
    took_ns = max(1, wire.length_ns)
    seen = "" if bucket.completion_was_seen else " at most (its completion was not seen)"
    return f"{size(bucket.nbytes)} in {ms(took_ns)}{seen}: {size(bucket.nbytes / took_ns * 1e9)} a second."


def _name(rank: RankStep, param: int | None) -> str:
    return "an unknown parameter" if param is None else f"`{rank.layout.params[param].name}`"
