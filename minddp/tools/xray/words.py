"""A step in plain sentences, for the terminal and the page; parameters' names stand in backticks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from minddp.core.events import EventKind
from minddp.platform.wording import count, joined, size
from minddp.platform.wording import ranks as listed_ranks
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.timeline import NEGLIGIBLE, Activity, BucketHistory, Interval, RankStep, Step
from minddp.tools.xray.what_if import LEAST_SHARE, WhatIf

NO_LIMIT = 1e13  # bytes a second: the fit found no time that depends on the bytes
NOTABLE_NS = 50_000  # shorter waits are not mentioned
NOTABLE_MISS = 0.1  # of the step: a model that is further off is no basis for a decision


def ms(ns: float) -> str:
    """A duration, with three digits at most."""
    value = ns / 1e6
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} ms"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


# ---------------------------------------------------------------------- the step as a whole


def headline(step: Step) -> str:
    """The step in one sentence. See [Note: the cost of communication]."""
    if not step.complete:
        return f"This step did not come to its end: it stopped after {ms(step.length_ns)}."
    costs_ns = step.last.parts_ns[Activity.EXPOSED]
    longest = step.waits_longest
    waits_ns = step.waits_for_last_ns(longest)
    parts = []
    if costs_ns >= NEGLIGIBLE * step.length_ns:
        parts.append(f"communication costs {ms(costs_ns)} of it")
    if step.late_rank is not None:
        longer_ns = {a: step.last.parts_ns[a] - longest.parts_ns[a] for a in Activity}
        most = max(Activity, key=longer_ns.__getitem__)
        where = f" ({most.value}: {ms(longer_ns[most])} longer)" if 2 * longer_ns[most] >= waits_ns else ""
        parts.append(f"rank {longest.rank} waits {ms(waits_ns)} for rank {step.late_rank}{where}")
    if not parts:
        return f"A step takes {ms(step.length_ns)}, and hardly any of it is spent waiting for gradients."
    return f"A step takes {ms(step.length_ns)}; {joined(parts)}."


def modules_sentence(step: Step) -> str:
    """What each of several modules reduces in a step; empty for one."""
    parts = []
    for module in dict.fromkeys(one.module for one in step.ranks[0].passes):
        passes = [one for one in step.ranks[0].passes if one.module == module]
        buckets = [step.plan.buckets[index] for one in passes for index in one.buckets]
        nbytes = size(sum(bucket.nbytes for bucket in buckets))
        parts.append(f"`{module}` {nbytes} in {count(len(buckets), 'message')} of {count(len(passes), 'backward')}")
    if not parts:
        return ""
    return f"In a step, {joined(parts)}. Of several modules no other step is predicted."


def noise_sentence(analysis: Analysis) -> str:
    number, noise_ns = len(analysis.comparable), analysis.noise_ns
    if number < 2:
        return "Only one step was recorded: how far steps differ is not known."
    share = percent(noise_ns / analysis.typical.length_ns)
    return f"The middle half of {number} steps lie within {ms(noise_ns)} ({share}): in one step, less is noise."


# ---------------------------------------------------------------------- what would make it shorter


def advice_sentences(analysis: Analysis) -> list[str]:
    """The changes that gain most, in order, each with its gain; empty where they cannot be played."""
    if not analysis.what_ifs:
        return []
    if not analysis.advice:
        return [f"Nothing that was tried makes a step {percent(LEAST_SHARE)} shorter."]
    return [
        f"{sentence(change.title)}: {gain(analysis, change)}.{code}"
        for change in analysis.advice
        for code in [f" `{change.code}`" if change.code else ""]
    ]


def gain(analysis: Analysis, change: WhatIf) -> str:
    """How much shorter a step is by a change, and whether that is more than the noise that it leaves."""
    if abs(change.gain_ns) < 0.005 * analysis.what_ifs[0].step_ns:
        return "the same"
    how = "shorter" if change.gain_ns > 0 else "longer"
    share = percent(abs(change.gain_ns) / analysis.what_ifs[0].step_ns)
    noise = "" if _is_seen(analysis, change) else ", within the noise"
    return f"{ms(abs(change.gain_ns))} ({share}) {how}{noise}"


def _is_seen(analysis: Analysis, change: WhatIf) -> bool:
    return abs(change.gain_ns) >= analysis.noise_ns - max(0.0, change.evens_ns)


def verdict(analysis: Analysis) -> str:
    """Where the noise leaves no advice: none for the late rank of the headline, or none that gains more."""
    late = analysis.typical.late_rank
    is_tried = any(late in change.ranks for change in analysis.what_ifs)
    is_worth = any(_is_seen(analysis, change) for change in analysis.advice)
    sentences = []
    if late is not None and not is_tried and len(analysis.played) > 1 and analysis.what_ifs:
        sentences.append(f"Rank {late} is late in this step, but in too few others to tell that from noise.")
    if analysis.advice and not is_worth:
        sentences.append("Nothing that was tried gains more than the noise.")
    return " ".join(sentences)


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def model_sentences(analysis: Analysis) -> list[str]:
    """The model behind the predictions, and its error for the step as recorded; empty without predictions."""
    costs, step = analysis.costs, analysis.typical
    if costs is None or not analysis.what_ifs:
        return []
    wire = costs.wire
    parts = [f"{1e3 * wire.latency_s:.2g} ms"] if wire.latency_s > 1e-6 else []
    parts += [f"its bytes at {size(wire.bytes_per_s)} a second"] if wire.bytes_per_s < NO_LIMIT else []
    one_size = "" if costs.separates_latency else " of about one size, so what each costs by itself is not known"
    return [
        f"The model: a message takes {' + '.join(parts)}, fitted to "
        f"{count(costs.messages, 'message')}{one_size}; ranks compute as recorded. Played again unchanged, this "
        f"step takes {ms(analysis.what_ifs[0].step.length_ns)}; recorded were {ms(step.length_ns)}."
    ]


def model_warning(analysis: Analysis) -> str:
    """Not to rely on predictions, where the model misses the recorded step by far; else empty."""
    if not analysis.what_ifs:
        return ""
    miss = analysis.what_ifs[0].step.length_ns / analysis.typical.length_ns - 1
    if abs(miss) < NOTABLE_MISS:
        return ""
    off = f"{percent(abs(miss))} {'more' if miss > 0 else 'less'}"
    return (
        f"Do not rely on these times. For the step as recorded the model says {off} than was measured; it may be "
        f"as wrong about the others."
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
    if not any(event.kind is EventKind.OPTIMIZER_END for rank in recording.ranks for event in rank.events):
        sentences.append("No optimizer of torch.optim was seen: what else updates parameters counts as other.")
    sentences += [
        f"Rank {rank.rank} stood still for {ms(wait.ns)} in {count(wait.times, 'call')} of `{wait.where}`."
        for rank in recording.ranks
        for wait in rank.host_waits
        if wait.ns > NEGLIGIBLE * (rank.stopped_ns - rank.events[0].t_ns)
    ]
    sentences += [f"Rank {rank.rank} ended with {rank.error}" for rank in recording.ranks if rank.error]
    findings = dict.fromkeys(finding for rank in recording.ranks for finding in rank.findings)  # of the guard
    return [*sentences, *findings, *recording.notes]


# ---------------------------------------------------------------------- one bucket


class Stage(NamedTuple):
    """A part of a bucket's life: its name, its time, and what it is, in a sentence."""

    name: str
    interval: Interval
    sentence: str


def life_of(step: Step, rank: RankStep, bucket: BucketHistory) -> Iterator[Stage]:
    """A bucket's life on one rank, stage by stage, without those that did not happen."""
    if bucket.fills is not None and bucket.last_param is not None:
        gradients = count(len(rank.plan.buckets[bucket.index].slots), "gradient")
        name = rank.plan.params[bucket.last_param].name
        sentence = f"{gradients} within {ms(bucket.fills.length_ns)}; the last is `{name}`."
        yield Stage("fills", bucket.fills, sentence)
    passage = step.passage(bucket.index, rank)
    if bucket.ready_ns is None or bucket.launched_ns is None or passage is None:
        return
    held = Interval(bucket.ready_ns, bucket.launched_ns)
    yield Stage("held", held, _held_sentence(held))
    if passage.queues.length_ns:
        sentence = f"Bucket {bucket.index - 1} arrives {ms(passage.queues.length_ns)} later: one travels at a time."
        yield Stage("queues", passage.queues, sentence)
    last = step.last_join(bucket.index)
    if passage.wire is None:
        sentence = "It never arrived: what the other ranks did with it is not known."
        yield Stage("waits for ranks", passage.waits_for_ranks, sentence)
        return
    if last is not None:
        sentence = _ranks_sentence(step, rank, last[1], passage.waits_for_ranks)
        yield Stage("waits for ranks", passage.waits_for_ranks, sentence)
    yield Stage("on the wire", passage.wire, _wire_sentence(rank, bucket, passage.wire))


def _held_sentence(held: Interval) -> str:
    if held.length_ns < NOTABLE_NS:
        return "It is launched at once: all buckets before it were."
    return f"It is ready, but for {ms(held.length_ns)} a bucket before it is not: buckets leave in plan order."


def _ranks_sentence(step: Step, rank: RankStep, last_rank: int, waits: Interval) -> str:
    late = ms(waits.length_ns)
    if step.adds_after_ns and waits.length_ns >= NOTABLE_NS:
        return f"In shared memory, ranks add while they wait: rank {last_rank} begins to wait {late} later."
    if last_rank == rank.rank:
        return "This rank is the last to launch it."
    if waits.length_ns < NOTABLE_NS:
        return "All ranks are there: the sum can begin."
    return f"The wire is free, but rank {last_rank} launches it {late} later: until then nothing can be added up."


def _wire_sentence(rank: RankStep, bucket: BucketHistory, wire: Interval) -> str:
    took_ns = max(1, wire.length_ns)
    seen = "" if bucket.completion_was_seen else " at most (its completion was not seen)"
    exposed_ns = sum(part.length_ns for part in rank.exposed([wire]))
    return (
        f"{size(bucket.nbytes)} in {ms(took_ns)}{seen}, {size(bucket.nbytes / took_ns * 1e9)} a second: "
        f"{ms(rank.hidden_ns(wire, bucket.index))} hidden by backward, {ms(exposed_ns)} exposed."
    )
