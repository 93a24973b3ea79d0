"""A step as a table and in sentences, for the terminal and the page. Code stands in backticks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from minddp.platform.wording import count, size
from minddp.platform.wording import ranks as listed_ranks
from minddp.tools.xray.analysis import LEAST_SHARE, Analysis, WhatIf
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.timeline import Activity, BucketHistory, RankStep, RecordedStep

MOST_COLUMNS = 8
NOTABLE_NS = 5_000  # shorter times are written as 0.00 ms
NO_LIMIT = 1e13  # bytes a second: the fit found no time that depends on the bytes
NOTABLE_MISS = 0.1  # of the step: a model with a larger error is no basis for a decision
WHERE = {
    Activity.LOSS: Activity.LOSS.value,
    Activity.OPTIMIZER: "in the optimizer",
    Activity.OTHER: "in other work",
}


def ms(ns: float) -> str:
    """A duration, with three digits at most."""
    value = ns / 1e6
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} ms"


def explain(analysis: Analysis, console: Console) -> None:
    """Print the typical step on each rank, and the advice."""
    step = analysis.typical
    console.print(headline(step), style="bold", highlight=False)
    shown, more = step.ranks[:MOST_COLUMNS], len(step.ranks) - MOST_COLUMNS
    table = Table("", *(f"rank {rank.rank}" for rank in shown), box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for label, cells in rows_of(step, shown):
        table.add_row(label, *cells, style="red" if label == Activity.EXPOSED.value else "")
    console.print(table)
    advice = [f"{k}. {sentence}" for k, sentence in enumerate(advice_sentences(analysis), 1)]
    which = f"This is step {step.number}, the median of {count(len(analysis.steps), 'step')}."
    sentences = [f"And {more} more."] if more > 0 else []
    sentences += [noise_sentence(analysis), *advice, *model_sentences(analysis)]
    for sentence in [*sentences, f"{which} {facts(analysis.recording)}"]:
        console.print(sentence, markup=False, highlight=False)


def rows_of(step: RecordedStep, ranks: Sequence[RankStep]) -> Iterator[tuple[str, list[str]]]:
    """The rows of the table: activities that take a notable time, and their sum; then the communication."""
    times = {activity.value: [rank.parts_ns[activity] for rank in ranks] for activity in Activity}
    times["step"] = [rank.length_ns for rank in ranks]
    for label, times_ns in times.items():
        if max(times_ns) >= NOTABLE_NS:
            yield label, list(map(ms, times_ns))
        waits_ns = [step.waits_for_last_ns(rank) for rank in ranks]
        if label == Activity.EXPOSED.value and max(waits_ns) >= NOTABLE_NS:
            yield "  waiting for a slower rank", list(map(ms, waits_ns))
    yield "communication hidden", [f"{step.overlap(rank):.0%}" for rank in ranks]
    yield "buckets", [f"{len(rank.plan.buckets)}, {size(rank.plan.nbytes)}" for rank in ranks]


# ---------------------------------------------------------------------- the step as a whole


def headline(step: RecordedStep) -> str:
    """Where the step's time goes: see the cost of communication in `timeline.py`."""
    costs_ns, longest = step.last.parts_ns[Activity.EXPOSED], max(step.ranks, key=step.waits_for_last_ns)
    waits_ns = step.waits_for_last_ns(longest)
    sentences = [f"Step: {ms(step.length_ns)}."]
    if costs_ns >= LEAST_SHARE * step.length_ns:
        sentences.append(f"Exposed communication: {ms(costs_ns)}.")
    if waits_ns >= LEAST_SHARE * step.length_ns:
        longer_ns = {a: step.last.parts_ns[a] - longest.parts_ns[a] for a in Activity}
        most = max(Activity, key=longer_ns.__getitem__)
        spends = f", which spends {ms(longer_ns[most])} more {WHERE.get(most, f'in {most.value}')}"
        is_reason = 2 * longer_ns[most] >= waits_ns
        sentences.append(
            f"Rank {longest.rank} waits {ms(waits_ns)} for rank {step.last.rank}{spends if is_reason else ''}."
        )
    if len(sentences) == 1:
        sentences.append("Hardly any of it is exposed communication.")
    return " ".join(sentences)


def noise_sentence(analysis: Analysis) -> str:
    """How far steps differ."""
    if len(analysis.steps) < 2:
        return "Only one step was recorded, so the noise is not known."
    noise_ns, share = analysis.noise_ns, analysis.noise_ns / analysis.typical.length_ns
    return f"Noise: {ms(noise_ns)} ({share:.0%}), the range of the middle half of {len(analysis.steps)} steps."


# ---------------------------------------------------------------------- the changes that would make it shorter


def advice_sentences(analysis: Analysis) -> list[str]:
    """The changes that gain most, in order; empty if no change could be tried."""
    if analysis.what_ifs and not analysis.advice:
        return [f"No change that was tried makes a step {LEAST_SHARE:.0%} shorter."]
    return [change_sentence(analysis, change) for change in analysis.advice]


def change_sentence(analysis: Analysis, change: WhatIf) -> str:
    """How much shorter a step is by a change, and whether that is more than the noise."""
    share = change.gain_ns / analysis.typical.length_ns
    noise = "" if change.gain_ns >= analysis.noise_ns else ", within the noise"
    code = f" `{change.code}`" if change.code else ""
    return f"{change.title[:1].upper()}{change.title[1:]}: {ms(change.gain_ns)} ({share:.0%}) shorter{noise}.{code}"


def model_sentences(analysis: Analysis) -> list[str]:
    """The model behind the predictions, and its error for the typical step; empty without predictions."""
    if analysis.costs is None or analysis.predicted_ns is None:
        return []
    wire, predicted_ns = analysis.costs.wire, analysis.predicted_ns
    recorded_ns = analysis.typical.length_ns
    parts = [f"{1e3 * wire.latency_s:.2g} ms"] if wire.latency_s > 1e-6 else []
    parts += [f"its bytes at {size(wire.bytes_per_s)} a second"] if wire.bytes_per_s < NO_LIMIT else []
    said = (
        f"The model: a message takes {' + '.join(parts)}; ranks compute as recorded. "
        f"It predicts {ms(predicted_ns)} for the typical step, which took {ms(recorded_ns)}."
    )
    if abs(predicted_ns / recorded_ns - 1) < NOTABLE_MISS:
        return [said]
    return [said, "Do not rely on these predictions: the model is wrong about the step as recorded."]


# ---------------------------------------------------------------------- the recording


def setting(recording: Recording) -> str:
    """The recording and its place, in one line."""
    title, wrapper, first = recording.title, recording.wrapper, recording.ranks[0]
    device = "CPU" if first.device == "cpu" else first.device
    place = f"{count(recording.world_size, 'rank')} on {device}"
    return ", ".join([title, *([] if wrapper in title else [wrapper]), place, first.backend])


def facts(recording: Recording) -> str:
    """Sentences about the recording itself."""
    hosts = sorted({rank.host for rank in recording.ranks})
    sentences = [f"Recorded on {listed_ranks([rank.rank for rank in recording.ranks])} ({', '.join(hosts)})."]
    if error_ns := max(rank.clock_error_ns for rank in recording.ranks):
        sentences.append(f"The ranks' clocks agree within {ms(error_ns)}.")
    if any(rank.is_full for rank in recording.ranks):
        sentences.append(f"Only the latest {len(recording.ranks[0].events):,} events of a rank are kept.")
    return " ".join([*sentences, *recording.notes])


# ---------------------------------------------------------------------- one bucket


def history(step: RecordedStep, rank: RankStep, bucket: BucketHistory) -> str:
    """The history of a bucket on one rank, a stage a line."""
    lines = [f"{size(bucket.nbytes)}, blocks the rank for {ms(bucket.awaited_ns)}"]
    if bucket.last_param is not None:
        lines.append(f"its last gradient is {rank.plan.params[bucket.last_param].name}")
    passage, last = step.passage(bucket.index, rank), step.last_join(bucket.index)
    if passage is not None:
        lines.append(f"queues for {ms(passage.queues.length_ns)}: one bucket travels at a time")
        if last is not None:
            lines.append(f"waits for ranks for {ms(passage.waits_for_ranks.length_ns)}: rank {last[1]} joins last")
        seen = "" if bucket.completion_was_seen else " at most, since its completion was not seen"
        speed = size(bucket.nbytes / max(1, passage.wire.length_ns) * 1e9)
        lines.append(f"on the wire for {ms(passage.wire.length_ns)}{seen}: {speed} a second")
    return "\n".join(lines)
