"""A step in plain sentences, for the terminal, the page and the picture. Pure.

Names of parameters stand in backticks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from minddp.platform.wording import count, joined, size
from minddp.platform.wording import ranks as listed_ranks
from minddp.xray.analysis import Analysis
from minddp.xray.recording import Recording
from minddp.xray.timeline import Activity, BucketHistory, Interval, RankStep, Step, measure_ns
from minddp.xray.waits import Cause, Wait, worst_wait

NEGLIGIBLE = 0.01  # of a step
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
    """The bucket for which a rank waits longest, and for what it waits meanwhile."""
    wait = worst_wait(step)
    if wait is None or wait.length_ns < NEGLIGIBLE / 2 * step.length_ns:
        return "No rank stands still for a bucket for a notable time."
    causes = [(cause, ns) for cause, ns in wait.ns_by_cause.items() if ns >= NOTABLE_NS]
    listed = joined([f"{ms(ns)} {_while(step, wait, cause)}" for cause, ns in causes])
    still = f"rank {wait.rank.rank} stands still for it for {ms(wait.length_ns)}"
    return f"Bucket {wait.bucket} costs most: {still}{f' ({listed})' if listed else ''}."


def _while(step: Step, wait: Wait, cause: Cause) -> str:
    last = step.last_launch(wait.bucket)
    return {
        Cause.EARLIER_BUCKET: f"while bucket {wait.bucket - 1} is still on the wire",
        Cause.OTHER_RANK: f"until rank {last[1] if last else '?'} launches it",
        Cause.WIRE: f"while its {size(wait.rank.buckets[wait.bucket].nbytes)} are on the wire",
        Cause.WAKING: "after it has arrived",
        Cause.UNKNOWN: "for agreements that are not about one bucket",
    }[cause]


def plans_sentence(analysis: Analysis) -> str:
    """The predicted lengths of the step under other plans; empty where that cannot be predicted."""
    lengths = [f"{ms(plan.prediction.length_ns)} ({plan.title})" for plan in analysis.plans]
    return f"Predicted: {', '.join(lengths)}." if lengths else ""


def model_sentences(analysis: Analysis) -> list[str]:
    """The model behind the predictions, its error for the recorded plan, and more ranks; empty without them."""
    fit, step = analysis.fit, analysis.typical
    if fit is None or not analysis.plans:
        return []
    predicted_ns = analysis.plans[0].prediction.length_ns
    latency = f"{1e3 * fit.link.latency_s:.2g} ms + " if fit.link.latency_s > 1e-6 else ""
    model = (
        f"The model: a message takes {latency}its bytes at {size(fit.link.bytes_per_s)} a second, fitted to "
        f"{count(fit.messages, 'message')}; gradients become ready as recorded. For the recorded plan it says "
        f"{ms(predicted_ns)}, recorded were {ms(step.length_ns)}."
    )
    if not fit.separates_latency:
        return [model, "All messages have one size, so their latency is not known."]
    lengths = [f"{ms(step.length_ns)} with {ranks}" for ranks, step in analysis.with_other_ranks.items()]
    more = f"With more ranks in a ring of the same wires, a step is predicted to take {', '.join(lengths)}."
    return [model, more] if lengths else [model]


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
    error_ns = recording.clock_error_ns
    if len(recording.ranks) > 1 and error_ns is None:
        sentences.append("The ranks' clocks were not compared: times of different ranks may be apart.")
    elif len(recording.ranks) > 1:
        apart = f"The ranks' clocks agree within {ms(error_ns)}." if error_ns else "All ranks read one clock."
        sentences.append(apart)
    dropped = sum(rank.dropped for rank in recording.ranks)
    kept = sum(len(rank.events) for rank in recording.ranks)
    sentences.append(
        f"{kept:,} events; none dropped."
        if not dropped
        else f"{kept:,} events; the {dropped:,} oldest did not fit the ring of {recording.ranks[0].capacity:,}."
    )
    sentences += [f"Rank {rank.rank} ended with {rank.error}" for rank in recording.ranks if rank.error]
    return sentences + list(recording.notes)


# ---------------------------------------------------------------------- one bucket


class Stage(NamedTuple):
    """A part of a bucket's life: its name, its time, and what it is, in a sentence."""

    name: str
    interval: Interval
    sentence: str


def life_of(step: Step, rank: RankStep, bucket: BucketHistory) -> list[Stage]:
    """A bucket's life on one rank, stage by stage, without those that did not happen."""
    return [stage for stage in _stages(step, rank, bucket) if stage.interval.end_ns >= stage.interval.begin_ns]


def _stages(step: Step, rank: RankStep, bucket: BucketHistory) -> Iterator[Stage]:
    if bucket.fills is not None and bucket.last_param is not None:
        gradients = count(len(rank.plan.buckets[bucket.index].slots), "gradient")
        name = rank.plan.params[bucket.last_param].name
        sentence = f"{gradients} within {ms(bucket.fills.length_ns)}; the last is `{name}`."
        yield Stage("fills", bucket.fills, sentence)
    passage = step.passage(bucket.index, rank)
    if bucket.ready_ns is None or bucket.launched_ns is None or passage is None:
        return
    yield Stage("held", Interval(bucket.ready_ns, bucket.launched_ns), _held_sentence(bucket))
    if passage.queues.length_ns:
        sentence = f"Bucket {bucket.index - 1} is still on the wire for {ms(passage.queues.length_ns)}."
        yield Stage("queues", passage.queues, sentence)
    last = step.last_launch(bucket.index)
    if passage.wire is None:
        sentence = "It never arrived: what the other ranks did with it is not known."
        yield Stage("waits for ranks", passage.waits_for_ranks, sentence)
        return
    if last is not None:
        sentence = _ranks_sentence(rank, last[1], passage.waits_for_ranks)
        yield Stage("waits for ranks", passage.waits_for_ranks, sentence)
    yield Stage("on the wire", passage.wire, _wire_sentence(rank, bucket, passage.wire))


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


def _wire_sentence(rank: RankStep, bucket: BucketHistory, wire: Interval) -> str:
    took_ns = max(1, wire.length_ns)
    seen = "" if bucket.completion_was_seen else " at most (its completion was not seen)"
    exposed_ns = measure_ns(rank.exposed([wire]))
    return (
        f"{size(bucket.nbytes)} in {ms(took_ns)}{seen}, {size(bucket.nbytes / took_ns * 1e9)} a second: "
        f"{ms(rank.hidden_ns(wire))} hidden by backward, {ms(exposed_ns)} exposed."
    )
