from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from minddp.core.events import EventKind as K
from minddp.xray import words
from minddp.xray.analysis import Analysis
from minddp.xray.recording import ClockOffset, Recording, Stamped
from tests.xray.made_up import MIB, MS, Rank, Wire, layout, recording

SLOW = Wire(latency_ns=MS // 2, bytes_per_ms=MIB / 4)


def analysis(*ranks: Rank, sizes: list[list[float]], wire: Wire = SLOW, steps: int = 1) -> Analysis:
    return Analysis(recording(ranks, layout(sizes), wire=wire, steps=steps))


@pytest.mark.parametrize(
    ("ns", "text"), [(1_234, "0.00 ms"), (1_234_567, "1.23 ms"), (12_345_678, "12.3 ms"), (123_456_789, "123 ms")]
)
def test_durations_have_three_digits_that_matter(ns: int, text: str) -> None:
    assert words.ms(ns) == text


def test_the_headline_names_the_rank_that_waits_longest() -> None:
    step = analysis(Rank(), Rank(late_ms=4), sizes=[[2], [2]]).typical
    assert words.headline(step) == "A step takes 47.0 ms; rank 0 waits 12.0 ms of it for gradients."


def test_a_step_without_waiting_is_said_to_be_one() -> None:
    step = analysis(Rank(), sizes=[[2], [2]], wire=Wire(0, 1e15)).typical
    assert "hardly any of it is spent waiting" in words.headline(step)
    assert words.worst_sentence(step) == "No rank stands still for a bucket for a notable time."
    assert words.overlap_sentence(step) == "100% of the communication is hidden behind computation."


@pytest.mark.parametrize(
    ("ranks", "sizes", "says"),
    [
        ([Rank(), Rank()], [[2], [2]], "(8.00 ms while its 2 MiB are on the wire)."),
        ([Rank(), Rank()], [[8], [1], [9]], "(36.0 ms while its 9 MiB are on the wire)."),
        (
            [Rank(), Rank(late_ms=50)],
            [[0.1], [0.1]],
            "(40.0 ms until rank 1 launches it and 0.90 ms while its 102 KiB are on the wire).",
        ),
    ],
    ids=["last gradient", "busy wire", "late rank"],
)
def test_the_worst_bucket_and_its_waits(ranks: list[Rank], sizes: list[list[float]], says: str) -> None:
    sentence = words.worst_sentence(analysis(*ranks, sizes=sizes).typical)
    assert sentence.startswith("Bucket ")
    assert sentence.endswith(says), sentence


def test_each_plan_is_predicted_in_a_sentence() -> None:
    made = analysis(Rank(), Rank(), sizes=[[1] * 4, [1] * 8])
    sentence = words.plans_sentence(made)
    assert all(f"({plan.title})" in sentence for plan in made.plans)
    assert words.plans_sentence(Analysis(replace(made.recording, has_plan=False))) == ""


def joined(steps: list[Recording]) -> Recording:
    """Recordings one after the other."""
    ranks = []
    for number, first in enumerate(steps[0].ranks):
        events, begin = [], 0
        for step in steps:
            events += [Stamped(t + begin, kind, subject) for t, kind, subject in step.ranks[number].events]
            begin += max(rank.stopped_ns for rank in step.ranks)
        ranks.append(replace(first, events=tuple(events), stopped_ns=begin))
    return replace(steps[0], ranks=tuple(ranks))


def test_the_model_comes_with_its_error() -> None:
    model, *_ = words.model_sentences(analysis(Rank(), Rank(), sizes=[[1], [2]]))
    assert "0.5 ms + its bytes at 250 MiB a second, fitted to 4 messages" in model
    unknown = "All messages have one size, so their latency is not known."
    assert words.model_sentences(analysis(Rank(), sizes=[[1], [1]]))[1:] == [unknown]


def test_more_ranks_are_predicted_where_the_latency_is_known() -> None:
    _, sentence = words.model_sentences(analysis(Rank(), Rank(), sizes=[[1], [2]]))
    assert re.search(r"a step is predicted to take \S+ ms with 4, \S+ ms with 8, \S+ ms with 16\.", sentence)
    assert len(words.model_sentences(analysis(Rank(), sizes=[[1], [2]]))) == 1


def test_the_life_of_a_bucket_has_no_gap_from_its_first_gradient_to_its_arrival() -> None:
    step = analysis(Rank(), Rank(late_ms=3), sizes=[[3, 3], [2], [1, 1]]).typical
    for rank in step.ranks:
        for bucket in rank.buckets:
            life = words.life_of(step, rank, bucket)
            assert bucket.fills is not None
            assert life[0].interval.begin_ns == bucket.fills.begin_ns
            assert life[-1].interval.end_ns == bucket.completed_ns
            assert [stage.name for stage in life][-1] == "on the wire"
            for before, after in pairwise(life):
                assert after.interval.begin_ns == before.interval.end_ns


def test_a_bucket_that_never_completed_has_lived_up_to_its_launch() -> None:
    made = recording([Rank()], layout([[1]]))
    events = tuple(e for e in made.ranks[0].events if e.t_ns < 32 * MS and e.kind is not K.BUCKET_COMPLETED)
    (step,) = Analysis(replace(made, ranks=(replace(made.ranks[0], events=events),))).steps
    (bucket,) = step.ranks[0].buckets
    assert [stage.name for stage in words.life_of(step, step.ranks[0], bucket)][:2] == ["fills", "held"]


def test_recordings_side_by_side_have_names_of_their_own() -> None:
    made = recording([Rank()], layout([[1]]), title="gpt")
    torchs = replace(made, wrapper="torch DDP")
    assert words.names([made]) == ["gpt"]
    assert words.names([made, replace(torchs, title="mlp")]) == ["gpt", "mlp"]
    assert words.names([made, torchs]) == ["gpt under minddp", "gpt under torch DDP"]
    assert words.names([made, torchs, made]) == [
        "gpt under minddp (1)",
        "gpt under torch DDP",
        "gpt under minddp (2)",
    ]
    of_rungs = [replace(made, title="minddp"), replace(torchs, title="minddp")]
    assert words.names(of_rungs) == ["minddp", "minddp under torch DDP"]


def test_recordings_of_several_places_name_each_of_them_once() -> None:
    two, three = (recording([Rank()] * ranks, layout([[1]])) for ranks in (2, 3))
    assert words.setting([two, three, two]) == "2 ranks on CPU, gloo; 3 ranks on CPU, gloo"


def test_facts_about_the_recording() -> None:
    made = recording([Rank(), Rank()], layout([[1]]))
    first, second = made.ranks
    second = replace(second, clock=ClockOffset(5, 40_000), dropped=7, error="ValueError: no")
    text = " ".join(words.facts(replace(made, ranks=(first, second), notes=("A note.",))))
    assert "Recorded on ranks 0 and 1 (somewhere)." in text
    assert "clocks agree within 0.04 ms" in text
    assert "the 7 oldest did not fit the ring of 1,000" in text
    assert "Rank 1 ended with ValueError: no" in text
    assert text.endswith("A note.")
    assert "All ranks read one clock." in words.facts(made)
