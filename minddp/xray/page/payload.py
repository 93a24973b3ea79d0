"""What the page is given to draw: lists, numbers and sentences. All that takes thought is decided here. Pure.

Times are milliseconds from the beginning of their step, rounded to the microsecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minddp.xray import words
from minddp.xray.analysis import Analysis
from minddp.xray.causes import Cause, total_by_cause, worst_wait
from minddp.xray.intervals import Interval
from minddp.xray.plans import Alternative
from minddp.xray.recording import Layout
from minddp.xray.timeline import Activity, BucketHistory, RankStep, Span, Step

Json = dict[str, Any]


def payload(analyses: Sequence[Analysis]) -> Json:
    """One exhibit for each recording; a single one also shows other plans."""
    return {
        "activities": [activity.value for activity in Activity],
        "exhibits": [_exhibit(analysis, alone=len(analyses) == 1) for analysis in analyses],
    }


def _exhibit(analysis: Analysis, *, alone: bool) -> Json:
    recording, steps = analysis.recording, analysis.steps
    typical = analysis.typical
    layouts: list[Layout] = []
    for step in steps:
        if step.layout not in layouts:
            layouts.append(step.layout)
    return {
        "title": recording.title,
        "wrapper": recording.wrapper,
        "place": words.place(recording),
        "facts": words.facts(recording),
        "typical": steps.index(typical),
        "steps": [_step(step, layouts.index(step.layout)) for step in steps],
        "layouts": [_layout(layout) for layout in layouts],
        "plans": [_plan(typical, plan) for plan in analysis.plans] if alone else [],
        "bestPlan": analysis.plans.index(analysis.best_plan) if alone and analysis.best_plan else 0,
        "model": words.model_sentence(analysis) if alone and analysis.plans else "",
        "suggestion": words.suggestion(analysis) if alone and typical.complete else "",
    }


def _layout(layout: Layout) -> Json:
    return {
        "origin": layout.origin,
        "params": [[param.name, param.nbytes] for param in layout.params],
        "buckets": [{"params": list(bucket.params), "nbytes": bucket.nbytes} for bucket in layout.buckets],
    }


def _step(step: Step, layout: int) -> Json:
    worst = worst_wait(step)
    return {
        "number": step.number,
        "layout": layout,
        "complete": step.complete,
        "length": _ms(step.length_ns),
        "end": _ms(step.end_ns - step.begin_ns),
        "headline": words.headline(step),
        "sentences": [words.overlap_sentence(step), words.worst_sentence(step)] if step.complete else [],
        "worst": None if worst is None else [worst.rank, worst.bucket],
        "ranks": [_rank(step, rank) for rank in step.ranks],
    }


def _rank(step: Step, rank: RankStep) -> Json:
    def at(t_ns: int | None) -> float | None:
        return None if t_ns is None else _ms(t_ns - step.begin_ns)

    causes = total_by_cause(step, rank) if step.complete else {}
    return {
        "rank": rank.rank,
        "begin": at(rank.interval.begin_ns),
        "end": at(rank.interval.end_ns),
        "backwardEnd": at(rank.gradients_complete_ns),
        "spans": [_span(step, span) for span in rank.spans],
        "parts": [_ms(rank.parts_ns[activity]) for activity in Activity],
        "overlap": round(step.overlap(rank), 4),
        "causes": [[cause.value, _ms(causes[cause])] for cause in Cause if causes.get(cause)],
        "ready": [[param, at(t_ns)] for param, t_ns in sorted(rank.ready_ns.items(), key=lambda item: item[1])],
        "buckets": _buckets(step, rank),
    }


def _span(step: Step, span: Span) -> list[float]:
    kind = list(Activity).index(span.activity)
    return [kind, _ms(span.begin_ns - step.begin_ns), _ms(span.end_ns - step.begin_ns), span.bucket]


def _buckets(step: Step, rank: RankStep) -> list[Json]:
    """Those that were launched. `pending`: nothing else is on the wire, and a rank has not launched it yet."""
    buckets, free_from_ns = [], 0
    for bucket in rank.buckets:
        if bucket.launched_ns is None:
            continue
        end_ns = bucket.completed_ns or rank.interval.end_ns
        wire = step.on_the_wire(bucket.index, rank) or Interval(end_ns, end_ns)
        pending = Interval(min(max(bucket.launched_ns, free_from_ns), wire.begin_ns), wire.begin_ns)
        free_from_ns = max(free_from_ns, wire.end_ns)
        buckets.append(_bucket(step, rank, bucket, pending, wire))
    return buckets


def _bucket(step: Step, rank: RankStep, bucket: BucketHistory, pending: Interval, wire: Interval) -> Json:
    def at(t_ns: int | None) -> float | None:
        return None if t_ns is None else _ms(t_ns - step.begin_ns)

    return {
        "index": bucket.index,
        "launched": at(bucket.launched_ns),
        "pending": at(pending.begin_ns),
        "begin": at(wire.begin_ns),
        "end": at(wire.end_ns),
        "lastGradient": at(bucket.last_gradient_ns),
        "awaited": _ms(bucket.awaited_ns),
        "verdict": words.hidden_sentence(step, rank, bucket),
        "life": [
            [stage.name, at(stage.begin_ns), words.ms(stage.end_ns - stage.begin_ns), stage.sentence]
            for stage in words.life_of(step, rank, bucket)
        ],
    }


def _plan(step: Step, plan: Alternative) -> Json:
    def at(t_ns: int) -> float:
        return _ms(t_ns - step.begin_ns)

    prediction = plan.prediction
    return {
        "title": plan.title,
        "code": plan.code,
        "length": _ms(prediction.length_ns),
        "exposed": _ms(prediction.exposed_ns),
        "sizes": [bucket.nbytes for bucket in prediction.layout.buckets],
        "ranks": [
            {
                "rank": rank.rank,
                "backwardEnd": at(rank.gradients_complete_ns),
                "after": [_span(step, span) for span in rank.after],
                "buckets": [[at(b.launched_ns), at(b.begin_ns), at(b.end_ns)] for b in rank.buckets],
            }
            for rank in prediction.ranks
        ],
    }


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)
