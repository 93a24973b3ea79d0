"""The data that the page draws: lists, numbers and sentences. Pure.

Times are milliseconds from the beginning of their step. Those that are drawn are rounded to the microsecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minddp.core.plan import BucketPlan
from minddp.platform.wording import size
from minddp.tools.xray import words
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.explain import rows_of
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.timeline import Activity, RankStep, RecordedStep, Span

Json = dict[str, Any]
KINDS = list(Activity)
COLORS = {  # names of colours in page.css, where they differ from the activity's
    Activity.BUFFERS: "forward",
    Activity.REBUILD: "forward",
    Activity.LOSS: "quiet",
    Activity.EXPOSED: "exposed",
    Activity.COPY_BACK: "quiet",
    Activity.DATA: "data",
}


def payload(analyses: Sequence[Analysis]) -> Json:
    """One exhibit for each recording; a single one also shows predictions."""
    recordings = [analysis.recording for analysis in analyses]
    named = zip(analyses, words.names(recordings), strict=True)
    return {
        "activities": [[activity.value, COLORS.get(activity, activity.value)] for activity in KINDS],
        "setting": words.setting(recordings),
        "exhibits": [_exhibit(analysis, name, alone=len(analyses) == 1) for analysis, name in named],
    }


def _exhibit(analysis: Analysis, name: str, *, alone: bool) -> Json:
    recording, steps = analysis.recording, analysis.steps
    layouts = list(dict.fromkeys(step.plan for step in steps))
    others = [change for change in analysis.what_ifs[1:] if alone and change not in analysis.advice]
    return {
        "title": name,
        "facts": words.facts(recording),
        "typical": steps.index(analysis.typical),
        "noise": words.noise_sentences(analysis),
        "steps": [_step(recording, step, layouts.index(step.plan)) for step in steps],
        "layouts": [_layout(plan) for plan in layouts],
        "advice": words.advice_sentences(analysis) if alone else [],
        "whatIfs": [words.change_sentence(analysis, change) for change in others],
        "model": words.model_sentences(analysis),
    }


def _layout(plan: BucketPlan) -> list[Json]:
    return [{"params": [slot.param for slot in b.slots], "size": size(b.nbytes)} for b in plan.buckets]


def _step(recording: Recording, step: RecordedStep, layout: int) -> Json:
    worst = max(step.last.buckets, key=lambda bucket: bucket.awaited_ns, default=None)
    errors = [f"Rank {rank.rank} ended with `{rank.error}`." for rank in recording.ranks if rank.error]
    return {
        "number": step.number,
        "layout": layout,
        "length": step.length_ns / 1e6,
        "exposed": step.last.parts_ns[Activity.EXPOSED] / 1e6,
        "end": _at(step, step.end_ns),
        "headline": words.headline(step),
        "errors": [] if step.complete else errors,
        "worst": None if worst is None or not worst.awaited_ns else [step.last.rank, worst.index],
        "ranks": [_rank(step, rank) for rank in step.ranks],
        "table": [
            [label, None if activity is None else KINDS.index(activity), *cells]
            for label, cells, activity in rows_of([(step, rank) for rank in step.ranks])
        ],
    }


def _rank(step: RecordedStep, rank: RankStep) -> Json:
    return {
        "rank": rank.rank,
        "backwardEnds": [_at(step, backward.complete_ns) for backward in rank.backwards],
        "spans": [_span(step, span) for span in rank.spans],
        "ready": [[p, _at(step, t_ns)] for p, t_ns in sorted(rank.ready_ns.items(), key=lambda item: item[1])],
        "buckets": [
            {
                "index": bucket.index,
                "stretches": [
                    [_at(step, begin_ns), _at(step, end_ns), int(moves), int(exposed)]
                    for begin_ns, end_ns, moves, exposed in step.stretches(bucket.index, rank)
                ],
                "stages": [
                    [name, words.ms(interval.length_ns), note]
                    for name, interval, note in words.stages_of(step, rank, bucket)
                ],
                "module": rank.backward_of(bucket.index).module,
                "awaited": words.ms(bucket.awaited_ns),
            }
            for bucket in rank.buckets
            if bucket.launched_ns is not None
        ],
    }


def _span(step: RecordedStep, span: Span) -> list[float | str | None]:
    kind = KINDS.index(span.activity)
    return [kind, _at(step, span.begin_ns), _at(step, span.end_ns), span.bucket, *filter(None, [span.module])]


def _at(step: RecordedStep, t_ns: int | None) -> float | None:
    return None if t_ns is None else round((t_ns - step.begin_ns) / 1e6, 3)
