"""What the page is given to draw: lists, numbers and sentences. All that takes thought is decided here. Pure.

Times are milliseconds from the beginning of their step. Those that are only drawn are rounded to the microsecond;
those that are written are not, or they would be rounded twice and differ from what the sentences say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from minddp.xray import words
from minddp.xray.analysis import Analysis
from minddp.xray.causes import Cause, total_by_cause, worst_wait
from minddp.xray.intervals import Interval, intersection, measure_ns
from minddp.xray.lane import Stretch, cut, stretches_of
from minddp.xray.plans import Alternative
from minddp.xray.predict import PredictedBucket, PredictedRank
from minddp.xray.recording import Layout, Recording
from minddp.xray.timeline import Activity, BucketHistory, Passage, RankStep, Span, Step

Json = dict[str, Any]


def payload(analyses: Sequence[Analysis]) -> Json:
    """One exhibit for each recording; a single one also shows other plans."""
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
    recording, steps = analysis.recording, analysis.steps
    typical = analysis.typical
    layouts: list[Layout] = []
    for step in steps:
        if step.layout not in layouts:
            layouts.append(step.layout)
    return {
        "title": name,
        "facts": words.facts(recording),
        "typical": steps.index(typical),
        "steps": [_step(recording, step, layouts.index(step.layout)) for step in steps],
        "layouts": [_layout(layout) for layout in layouts],
        "plans": [_plan(typical, plan) for plan in analysis.plans] if alone else [],
        "bestPlan": analysis.plans.index(analysis.best_plan) if alone and analysis.best_plan else 0,
        "model": words.model_sentence(analysis) if alone and analysis.plans else "",
        "suggestion": words.suggestion(analysis) if alone and typical.complete else "",
    }


def _layout(layout: Layout) -> Json:
    return {
        "params": [[param.name, param.nbytes] for param in layout.params],
        "buckets": [{"params": list(bucket.params), "nbytes": bucket.nbytes} for bucket in layout.buckets],
    }


def _step(recording: Recording, step: Step, layout: int) -> Json:
    worst = worst_wait(step)
    told = [words.overlap_sentence(step), words.worst_sentence(step)]
    errors = [f"Rank {rank.rank} ended with `{rank.error}`." for rank in recording.ranks if rank.error]
    return {
        "number": step.number,
        "layout": layout,
        "length": _exact_ms(step.length_ns),
        "end": _ms(step.end_ns - step.begin_ns),
        "headline": words.headline(step),
        "sentences": told if step.complete else errors,
        "worst": None if worst is None else [worst.rank, worst.bucket],
        "ranks": [_rank(step, rank) for rank in step.ranks],
    }


def _rank(step: Step, rank: RankStep) -> Json:
    def at(t_ns: int | None) -> float | None:
        return None if t_ns is None else _ms(t_ns - step.begin_ns)

    causes = total_by_cause(step, rank) if step.complete else {}
    return {
        "rank": rank.rank,
        "length": _exact_ms(rank.length_ns),
        "backwardEnd": at(rank.gradients_complete_ns),
        "spans": [_span(step, span) for span in rank.spans],
        "parts": [_exact_ms(rank.parts_ns[activity]) for activity in Activity],
        "overlap": round(step.overlap(rank), 4),
        "causes": [[cause.value, _exact_ms(causes[cause])] for cause in Cause if causes.get(cause)],
        "ready": [[param, at(t_ns)] for param, t_ns in sorted(rank.ready_ns.items(), key=lambda item: item[1])],
        "buckets": _buckets(step, rank),
    }


def _span(step: Step, span: Span) -> list[float]:
    kind = list(Activity).index(span.activity)
    return [kind, _ms(span.begin_ns - step.begin_ns), _ms(span.end_ns - step.begin_ns), span.bucket]


def _buckets(step: Step, rank: RankStep) -> list[Json]:
    """Those that were launched."""
    passages = [(bucket, step.passage(bucket.index, rank)) for bucket in rank.buckets]
    return [
        _bucket(step, rank, bucket, passage) | _figures(step, rank, bucket, passage)
        for bucket, passage in passages
        if passage is not None
    ]


def _bucket(step: Step, rank: RankStep, bucket: BucketHistory, passage: Passage) -> Json:
    def at(t_ns: int | None) -> float | None:
        return None if t_ns is None else _ms(t_ns - step.begin_ns)

    return {
        "index": bucket.index,
        "launched": at(bucket.launched_ns),
        "pending": at(passage.waits_for_ranks.begin_ns),
        "begin": at(passage.waits_for_ranks.end_ns),
        "end": at((passage.wire or passage.waits_for_ranks).end_ns),
        "stretches": _stretches(step, stretches_of(step, rank, bucket.index)),
        "lastGradient": at(bucket.last_gradient_ns),
        "verdict": words.hidden_sentence(step, rank, bucket),
        "life": [
            {
                "name": stage.name,
                "begin": at(stage.begin_ns),
                "end": at(stage.end_ns),
                "stretches": _stretches(
                    step,
                    cut(Interval(stage.begin_ns, stage.end_ns), rank.waits, moves=stage.name == "on the wire"),
                ),
                "took": words.ms(stage.end_ns - stage.begin_ns),
                "sentence": stage.sentence,
            }
            for stage in words.life_of(step, rank, bucket)
        ],
    }


def _figures(step: Step, rank: RankStep, bucket: BucketHistory, passage: Passage) -> Json:
    """Whom a bucket waited for, and what of its time on the wire cost nothing.

    `behind`: how long it was ready before it could leave, and how long it had left before the wire was free.
    """
    assert bucket.launched_ns is not None, "only buckets that were launched are shown"
    last = step.last_launch(bucket.index)
    return {
        "lastRank": None if last is None else [last[1], _exact_ms(last[0] - bucket.launched_ns)],
        "behind": [_exact_ms(bucket.held_ns), _exact_ms(passage.queues.length_ns)],
        "wire": _on_the_wire(rank, bucket, passage.wire) if passage.wire else None,
        "awaited": _exact_ms(bucket.awaited_ns),
    }


def _on_the_wire(rank: RankStep, bucket: BucketHistory, wire: Interval) -> dict[str, float]:
    """Meanwhile the rank ran backward, or did something else, or stood still. See [Note: exposed communication]."""
    hidden_ns = bucket.hidden_ns(wire)
    exposed_ns = measure_ns(intersection([wire], [span.interval for span in rank.waits]))
    return {
        "hidden": _exact_ms(hidden_ns),
        "beside": _exact_ms(wire.length_ns - hidden_ns - exposed_ns),
        "exposed": _exact_ms(exposed_ns),
    }


def _stretches(step: Step, stretches: Iterable[Stretch]) -> list[list[float]]:
    return [
        [_ms(begin_ns - step.begin_ns), _ms(end_ns - step.begin_ns), int(moves), int(exposed)]
        for begin_ns, end_ns, moves, exposed in stretches
    ]


def _plan(step: Step, plan: Alternative) -> Json:
    prediction = plan.prediction
    return {
        "title": plan.title,
        "code": plan.code,
        "length": _exact_ms(prediction.length_ns),
        "exposed": _exact_ms(max(rank.exposed_ns for rank in prediction.ranks)),
        "sizes": [bucket.nbytes for bucket in prediction.layout.buckets],
        "ranks": [
            {
                "after": [_span(step, span) for span in rank.after],
                "buckets": [_predicted_bucket(step, rank, bucket) for bucket in rank.buckets],
            }
            for rank in prediction.ranks
        ],
    }


def _predicted_bucket(step: Step, rank: PredictedRank, bucket: PredictedBucket) -> Json:
    waits = [span for span in rank.after if span.activity is Activity.EXPOSED]
    return {
        "index": bucket.index,
        "stretches": _stretches(step, cut(Interval(bucket.begin_ns, bucket.end_ns), waits, moves=True)),
    }


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)


def _exact_ms(ns: int) -> float:
    return ns / 1e6
