"""The data that the page draws: lists, numbers and sentences. Everything that needs thought is decided here. Pure.

Times are milliseconds from the beginning of their step. Those that are only drawn are rounded to the microsecond;
those that are written are not, or they would be rounded twice and differ from those in the sentences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from minddp.core.plan import BucketPlan
from minddp.xray import words
from minddp.xray.analysis import Analysis
from minddp.xray.recording import Recording
from minddp.xray.timeline import Activity, BucketHistory, RankStep, Span, Step
from minddp.xray.waits import Cause, Stretch, stretches, stretches_of, total_by_cause, worst_wait
from minddp.xray.what_if import Alternative

Json = dict[str, Any]


def payload(analyses: Sequence[Analysis]) -> Json:
    """One exhibit for each recording; a single one also shows predictions."""
    recordings = [analysis.recording for analysis in analyses]
    names = words.names(recordings)
    return {
        "activities": [activity.value for activity in Activity],
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
        "steps": [_step(recording, step, layouts.index(step.plan)) for step in steps],
        "layouts": [_layout(plan) for plan in layouts],
        "plans": [_plan(plan) for plan in analysis.plans] if alone else [],
        "model": " ".join(words.model_sentences(analysis)),
    }


def _layout(plan: BucketPlan) -> Json:
    return {
        "params": [[param.name, param.nbytes] for param in plan.params],
        "buckets": [{"params": [slot.param for slot in b.slots], "nbytes": b.nbytes} for b in plan.buckets],
    }


def _step(recording: Recording, step: Step, layout: int) -> Json:
    worst = worst_wait(step)
    sentences = [words.overlap_sentence(step), words.worst_sentence(step)]
    errors = [f"Rank {rank.rank} ended with `{rank.error}`." for rank in recording.ranks if rank.error]
    return {
        "number": step.number,
        "layout": layout,
        "length": step.length_ns / 1e6,
        "end": _ms(step.end_ns - step.begin_ns),
        "headline": words.headline(step),
        "sentences": sentences if step.complete else errors,
        "worst": None if worst is None else [worst.rank.rank, worst.bucket],
        "ranks": [_rank(step, rank) for rank in step.ranks],
    }


def _rank(step: Step, rank: RankStep) -> Json:
    causes = total_by_cause(step, rank) if step.complete else {}
    return {
        "rank": rank.rank,
        "length": rank.length_ns / 1e6,
        "backwardEnd": _at(step, rank.gradients_complete_ns),
        "spans": [_span(step, span) for span in rank.spans],
        "parts": [rank.parts_ns[activity] / 1e6 for activity in Activity],
        "overlap": round(step.overlap(rank), 4),
        "causes": [[cause.value, causes[cause] / 1e6] for cause in Cause if causes.get(cause)],
        "ready": [[p, _at(step, t_ns)] for p, t_ns in sorted(rank.ready_ns.items(), key=lambda item: item[1])],
        "buckets": [_bucket(step, rank, bucket) for bucket in rank.buckets if bucket.launched_ns is not None],
    }


def _span(step: Step, span: Span) -> list[float | None]:
    kind = list(Activity).index(span.activity)
    return [kind, _at(step, span.begin_ns), _at(step, span.end_ns), span.bucket]


def _bucket(step: Step, rank: RankStep, bucket: BucketHistory) -> Json:
    return {
        "index": bucket.index,
        "stretches": _stretches(step, stretches_of(step, rank, bucket.index)),
        "life": [_stage(step, rank, stage) for stage in words.life_of(step, rank, bucket)],
        "stood": f"Rank {rank.rank} stands still for it for {words.ms(bucket.awaited_ns)}.",
    }


def _stage(step: Step, rank: RankStep, stage: words.Stage) -> Json:
    return {
        "name": stage.name,
        "stretches": _stretches(step, stretches(stage.interval, rank, moves=stage.name == "on the wire")),
        "took": words.ms(stage.interval.length_ns),
        "sentence": stage.sentence,
    }


def _stretches(step: Step, drawn: Iterable[Stretch]) -> list[list[float | None]]:
    return [
        [_at(step, begin_ns), _at(step, end_ns), int(moves), int(exposed)]
        for begin_ns, end_ns, moves, exposed in drawn
    ]


def _plan(plan: Alternative) -> Json:
    step = plan.prediction
    return {
        "title": plan.title,
        "code": plan.code,
        "length": step.length_ns / 1e6,
        "exposed": max(rank.parts_ns[Activity.EXPOSED] for rank in step.ranks) / 1e6,
        "sizes": [bucket.nbytes for bucket in step.plan.buckets],
        "ranks": [
            {
                "spans": [_span(step, span) for span in rank.spans],
                "buckets": [
                    {"index": bucket.index, "stretches": _stretches(step, stretches_of(step, rank, bucket.index))}
                    for bucket in rank.buckets
                ],
            }
            for rank in step.ranks
        ],
    }


def _at(step: Step, t_ns: int | None) -> float | None:
    return None if t_ns is None else _ms(t_ns - step.begin_ns)


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)
