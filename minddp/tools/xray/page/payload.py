"""The data that the page draws: lists, numbers and sentences. Everything that needs thought is decided here. Pure.

Times are milliseconds from the beginning of their step. Those that are only drawn are rounded to the microsecond;
those that are written are not, or they would be rounded twice and differ from those in the sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minddp.core.plan import BucketPlan
from minddp.platform.wording import size
from minddp.tools.xray import words
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.parts import last_rows_of, rows_of
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.timeline import Activity, RankStep, Span, Step
from minddp.tools.xray.what_if import WhatIf

Json = dict[str, Any]
KINDS = list(Activity)


def payload(analyses: Sequence[Analysis]) -> Json:
    """One exhibit for each recording; a single one also shows predictions."""
    recordings = [analysis.recording for analysis in analyses]
    names = words.names(recordings)
    return {
        "activities": [activity.value for activity in KINDS],
        "setting": words.setting(recordings),
        "exhibits": [
            _exhibit(analysis, name, alone=len(analyses) == 1)
            for analysis, name in zip(analyses, names, strict=True)
        ],
    }


def _exhibit(analysis: Analysis, name: str, *, alone: bool) -> Json:
    recording, steps, typical = analysis.recording, analysis.steps, analysis.typical
    layouts = list(dict.fromkeys(step.plan for step in steps))
    return {
        "title": name,
        "facts": words.facts(recording),
        "typical": steps.index(typical),
        "noise": f"{words.noise_sentence(analysis)} {words.verdict(analysis)}".strip(),
        "steps": [_step(recording, step, layouts.index(step.plan)) for step in steps],
        "layouts": [_layout(plan) for plan in layouts],
        "advice": words.advice_sentences(analysis) if alone else [],
        "whatIfs": [_what_if(analysis, change) for change in analysis.what_ifs] if alone else [],
        "model": " ".join(words.model_sentences(analysis)),
        "warning": words.model_warning(analysis),
    }


def _layout(plan: BucketPlan) -> list[Json]:
    return [{"params": [slot.param for slot in b.slots], "size": size(b.nbytes)} for b in plan.buckets]


def _step(recording: Recording, step: Step, layout: int) -> Json:
    worst = max(step.last.buckets, key=lambda bucket: bucket.awaited_ns, default=None)
    errors = [f"Rank {rank.rank} ended with `{rank.error}`." for rank in recording.ranks if rank.error]
    return {
        "number": step.number,
        "layout": layout,
        "length": step.length_ns / 1e6,
        "exposed": step.last.parts_ns[Activity.EXPOSED] / 1e6,
        "end": _at(step, step.end_ns),
        "headline": words.headline(step),
        "sentences": [words.modules_sentence(step)] if step.complete else errors,
        "worst": None if worst is None or not worst.awaited_ns else [step.last.rank, worst.index],
        "ranks": [_rank(step, rank) for rank in step.ranks],
        "table": _table(step),
    }


def _table(step: Step) -> list[list[str | int | None]]:
    columns = [(step, rank) for rank in step.ranks]
    rows: list[list[str | int | None]] = [
        [label, None if activity is None else KINDS.index(activity), *map(words.ms, times_ns)]
        for label, times_ns, activity in rows_of(columns)
    ]
    return rows + [[label, None, *cells] for label, cells in last_rows_of(columns)]


def _rank(step: Step, rank: RankStep) -> Json:
    """What is drawn of a rank, and what is said about its buckets."""
    ends = [one.complete_ns for one in rank.passes] or [rank.gradients_complete_ns]
    return {
        "rank": rank.rank,
        "backwardEnds": [_at(step, end_ns) for end_ns in ends],
        "spans": [_span(step, span) for span in rank.spans],
        "ready": [[p, _at(step, t_ns)] for p, t_ns in sorted(rank.ready_ns.items(), key=lambda item: item[1])],
        "buckets": [
            {
                "index": bucket.index,
                "stretches": [
                    [_at(step, begin_ns), _at(step, end_ns), int(moves), int(exposed)]
                    for begin_ns, end_ns, moves, exposed in step.stretches(bucket.index, rank)
                ],
                "life": [
                    {"name": stage.name, "took": words.ms(stage.interval.length_ns), "sentence": stage.sentence}
                    for stage in words.life_of(step, rank, bucket)
                ],
                "module": rank.pass_of(bucket.index).module,
                "stood": f"Rank {rank.rank} stands still for it for {words.ms(bucket.awaited_ns)}.",
            }
            for bucket in rank.buckets
            if bucket.launched_ns is not None
        ],
    }


def _span(step: Step, span: Span) -> list[float | str | None]:
    kind = KINDS.index(span.activity)
    return [kind, _at(step, span.begin_ns), _at(step, span.end_ns), span.bucket, *filter(None, [span.module])]


def _what_if(analysis: Analysis, change: WhatIf) -> Json:
    step = change.step
    return {
        "title": words.sentence(change.title),
        "code": change.code,
        "gain": words.gain(analysis, change),
        "length": change.step_ns / 1e6,
        "exposed": step.last.parts_ns[Activity.EXPOSED] / 1e6,
        "number": step.number,
        "layout": _layout(step.plan),
        "ranks": [_rank(step, rank) for rank in step.ranks],
    }


def _at(step: Step, t_ns: int | None) -> float | None:
    return None if t_ns is None else round((t_ns - step.begin_ns) / 1e6, 3)
