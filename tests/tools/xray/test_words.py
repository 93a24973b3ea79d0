from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from minddp.core.events import EventKind as K
from minddp.tools.xray import words
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.explain import rows_of
from minddp.tools.xray.host import HostWait
from minddp.tools.xray.recording import ClockOffset, Recording
from tests.tools.xray.made_up import MIB, MS, Rank, Wire, joined, layout, recording

SLOW = Wire(latency_ns=MS // 2, bytes_per_ms=MIB / 4)


def analysis(*ranks: Rank, sizes: list[list[float]], wire: Wire = SLOW, steps: int = 1) -> Analysis:
    return Analysis(recording(ranks, layout(sizes), wire=wire, steps=steps))


@pytest.mark.parametrize(
    ("ns", "text"), [(1_234, "0.00 ms"), (1_234_567, "1.23 ms"), (12_345_678, "12.3 ms"), (123_456_789, "123 ms")]
)
def test_durations_have_three_digits_that_matter(ns: int, text: str) -> None:
    assert words.ms(ns) == text


def test_the_headline_divides_what_a_rank_waits_for() -> None:
    step = analysis(Rank(), Rank(late_ms=4), sizes=[[2], [2]]).typical
    assert words.headline(step) == (
        "Step: 47.0 ms. Exposed communication: 8.00 ms. Rank 0 waits 4.00 ms for rank 1."
    )


def test_a_step_without_waiting_is_said_to_be_one() -> None:
    step = analysis(Rank(), sizes=[[2], [2]], wire=Wire(0, 1e15)).typical
    assert words.headline(step).endswith(" ms. Hardly any of it is exposed communication.")


def test_the_last_ranks_wait_is_communication_and_the_others_wait_for_it() -> None:
    step = analysis(Rank(), Rank(loss_ms=6), sizes=[[2], [2]]).typical
    assert words.headline(step) == (
        "Step: 48.0 ms. Exposed communication: 8.00 ms. Rank 0 waits 5.00 ms for rank 1, which spends 5.00 ms more "
        "between forward and backward."
    )


def test_advice_says_what_is_gained_and_whether_that_is_noise() -> None:
    made = analysis(Rank(copy_ms=2), Rank(copy_ms=2, loss_ms=9), sizes=[[1] * 4, [1] * 8], steps=2)
    first, *others = words.advice_sentences(made)
    assert first.startswith("A wire 10 times as fast: ")
    assert any("Rank 1 as quick as the others between forward and backward: 8.00 ms (" in one for one in others)
    assert any(one.endswith(" `DistributedDataParallel(model, gradient_as_bucket_view=True)`") for one in others)
    assert "noise" not in "".join([first, *others])
    slower = analysis(Rank(copy_ms=2), Rank(copy_ms=2, loss_ms=29), sizes=[[1] * 4, [1] * 8])
    mixed = Analysis(joined([made.recording, slower.recording, made.recording, slower.recording]))
    assert words.noise_sentences(mixed) == "Noise: 20.0 ms (25%), the range of the middle half of 6 steps."
    assert any(one.endswith("shorter, within the noise.") for one in words.advice_sentences(mixed))


def test_a_healthy_recording_says_that_nothing_gains_more_than_the_noise() -> None:
    short, long = (analysis(*[Rank(forward_ms=ms)] * 2, sizes=[[1]]) for ms in (10, 40))
    mixed = Analysis(joined([short.recording, long.recording, short.recording, long.recording]))
    assert words.advice_sentences(mixed)
    assert words.noise_sentences(mixed).endswith("No change that was tried gains more than the noise.")


def test_delays_that_make_the_noise_are_not_hidden_in_it() -> None:
    quick, delayed = (analysis(Rank(), Rank(loss_ms=ms), sizes=[[1]]).recording for ms in (1, 90))
    made = Analysis(joined([quick, quick, delayed, quick, delayed, quick]))
    change = next(one for one in made.what_ifs if one.title.startswith("no delays in single steps"))
    assert change.gain_ns < made.noise_ns
    assert "noise" not in words.gain(made, change)


def test_a_rank_that_the_headline_names_is_in_the_first_advice() -> None:
    """In the mean of the steps, more seems to be gained by a quicker wire."""

    def step(forward_ms: float, mib_ms: float) -> Recording:
        made = [Rank(forward_ms=forward_ms, copy_ms=0, loss_ms=loss_ms) for loss_ms in (1, 11)]
        return recording(made, layout([[2], [2]]), wire=Wire(0, MIB / mib_ms))

    short, typical, long = step(10, 6), step(30, 1), step(50, 6)
    made = Analysis(joined([short, short, typical, long, long]))
    assert "Exposed communication: 2.00 ms." in words.headline(made.typical)
    assert "Rank 0 waits 10.0 ms for rank 1" in words.headline(made.typical)
    assert max(made.advice, key=lambda change: change.gain_ns).title == "a wire 10 times as fast"
    first, second, *_ = words.advice_sentences(made)
    assert first.startswith("Rank 1 as quick as the others between forward and backward: ")
    assert second.startswith("A wire 10 times as fast: ")
    assert "Rank 1" not in words.noise_sentences(made)


def test_a_rank_that_the_headline_names_without_advice_is_called_noise() -> None:
    on_time, late = Rank(copy_ms=0), Rank(copy_ms=0, loss_ms=11)
    one, other = (analysis(*ranks, sizes=[[1]]).recording for ranks in ((on_time, late), (late, on_time)))
    made = Analysis(joined([one, other, one, other]))
    assert "Rank 0 waits 10.0 ms for rank 1" in words.headline(made.typical)
    assert not [sentence for sentence in words.advice_sentences(made) if "ank 1" in sentence]
    said = "Rank 1 is late in this step, but in too few others to distinguish that from noise."
    assert said in words.noise_sentences(made)


def test_of_one_step_no_noise_is_known_and_without_gains_there_is_no_advice() -> None:
    made = analysis(Rank(copy_ms=0, optimizer_ms=0, other_ms=0), sizes=[[1]], wire=Wire(1, 1e15))
    assert words.noise_sentences(made) == "Only one step was recorded, so the noise is not known."
    assert words.advice_sentences(made) == ["No change that was tried makes a step 1% shorter."]


def test_in_shared_memory_a_bucket_waits_until_all_ranks_wait() -> None:
    made = recording([Rank(), Rank(loss_ms=5)], layout([[2], [2]]), wire=Wire(20 * MS, MIB))
    ranks = tuple(replace(rank, adds_after_ns=10**12) for rank in made.ranks)
    step = Analysis(replace(made, ranks=ranks)).typical
    late = step.ranks[1]
    (waits,) = (stage for stage in words.stages_of(step, late, late.buckets[0]) if stage[0] == "waits for ranks")
    assert waits[1].end_ns == late.gradients_complete_ns
    assert waits[2] == "rank 1 begins to wait last"


def test_the_model_comes_with_its_error() -> None:
    (model,) = words.model_sentences(analysis(Rank(), Rank(), sizes=[[1], [2]]))
    assert "0.5 ms + its bytes at 250 MiB a second, fitted to 4 messages" in model


def test_the_history_of_a_bucket_has_no_gap_from_its_first_gradient_to_its_arrival() -> None:
    step = analysis(Rank(), Rank(late_ms=3), sizes=[[3, 3], [2], [1, 1]]).typical
    for rank in step.ranks:
        for bucket in rank.buckets:
            names, intervals, _ = zip(*words.stages_of(step, rank, bucket), strict=True)
            assert bucket.fills is not None
            assert intervals[0].begin_ns == bucket.fills.begin_ns
            assert intervals[-1].end_ns == bucket.completed_ns
            assert names[-1] == "on the wire"
            for before, after in pairwise(intervals):
                assert after.begin_ns == before.end_ns


def test_a_bucket_that_never_completed_has_lived_up_to_its_launch() -> None:
    made = recording([Rank()], layout([[1]]))
    events = tuple(e for e in made.ranks[0].events if e.t_ns < 32 * MS and e.kind is not K.BUCKET_COMPLETED)
    (step,) = Analysis(replace(made, ranks=(replace(made.ranks[0], events=events),))).steps
    (bucket,) = step.ranks[0].buckets
    assert [name for name, *_ in words.stages_of(step, step.ranks[0], bucket)][:2] == ["fills", "held"]


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


def test_a_line_of_the_script_where_the_host_waits_is_named() -> None:
    made = recording([Rank()], layout([[1]]), steps=2)
    waits = (HostWait(".item() at train.py:31", 2, 3 * MS), HostWait(".cpu() at train.py:40", 1, 1000))
    text = " ".join(words.facts(replace(made, ranks=(replace(made.ranks[0], host_waits=waits),))))
    assert "Rank 0 waited 3.00 ms for the device in 2 calls of `.item() at train.py:31`." in text
    assert "train.py:40" not in text


def test_memory_is_in_the_table_where_it_is_known() -> None:
    made = recording([Rank(), Rank()], layout([[4]]))
    (step,) = Analysis(made).steps
    assert [row.label for row in rows_of([(step, step.ranks[0])])][-2:] == ["communication hidden", "buckets"]
    ranks = tuple(replace(rank, peak_bytes=(16 + 24 * rank.rank) * MIB) for rank in made.ranks)
    (step,) = Analysis(replace(made, ranks=ranks)).steps
    assert list(rows_of([(step, rank) for rank in step.ranks]))[-2:] == [
        ("buckets", ["1, 4 MiB"] * 2, None),
        ("peak memory (share of buckets)", ["16 MiB (25%)", "40 MiB (10%)"], None),
    ]


def test_facts_about_the_recording() -> None:
    made = recording([Rank(), Rank()], layout([[1]]))
    first, second = made.ranks
    second = replace(second, clock=ClockOffset(5, 40_000), dropped=7, error="ValueError: no")
    text = " ".join(words.facts(replace(made, ranks=(first, second), notes=("A note.",))))
    assert "Recorded on ranks 0 and 1 (somewhere)." in text
    assert "clocks agree within 0.04 ms" in text
    assert "the 7 oldest did not fit the ring of 1,000" in text
    assert text.endswith("Rank 1 ended with `ValueError: no`. A note.")
    assert words.facts(made) == ["Recorded on ranks 0 and 1 (somewhere)."]
