from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from minddp.tools.forecast.link import FREE, Link
from minddp.tools.xray import words
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.timeline import Activity
from tests.tools.xray.made_up import SLOW, Rank, joined, layout, recording


def analysis(*ranks: Rank, sizes: list[list[float]], wire: Link = SLOW, steps: int = 1) -> Analysis:
    return Analysis(recording(ranks, layout(sizes), wire=wire, steps=steps))


@pytest.mark.parametrize(
    ("ns", "text"), [(1_234, "0.00 ms"), (1_234_567, "1.23 ms"), (12_345_678, "12.3 ms"), (123_456_789, "123 ms")]
)
def test_durations_have_three_digits_that_matter(ns: int, text: str) -> None:
    assert words.ms(ns) == text


@pytest.mark.parametrize(
    ("ranks", "wire", "says"),
    [
        ([Rank()], FREE, "Step: 35.0 ms. Hardly any of it is exposed communication."),
        (
            [Rank(), Rank(late_ms=4)],
            SLOW,
            "Step: 47.0 ms. Exposed communication: 8.00 ms. Rank 0 waits 4.00 ms for rank 1.",
        ),
        (
            [Rank(), Rank(loss_ms=6)],
            SLOW,
            "Step: 48.0 ms. Exposed communication: 8.00 ms. Rank 0 waits 5.00 ms for rank 1, which spends 5.00 ms "
            "more between forward and backward.",
        ),
    ],
)
def test_the_headline_divides_what_a_rank_waits_for(ranks: list[Rank], wire: Link, says: str) -> None:
    """The wait of the last rank is communication, and the others wait for it."""
    assert words.headline(analysis(*ranks, sizes=[[2], [2]], wire=wire).typical) == says


def test_advice_says_what_is_gained_and_whether_that_is_noise() -> None:
    made = analysis(Rank(copy_ms=2), Rank(copy_ms=2, loss_ms=9), sizes=[[1] * 4, [1] * 8], steps=2)
    first, *others = words.advice_sentences(made)
    assert first.startswith("A wire 10 times as fast: ")
    assert any("Rank 1 as quick as the others: 8.00 ms (" in one for one in others)
    assert any(one.endswith(" `DistributedDataParallel(model, gradient_as_bucket_view=True)`") for one in others)
    assert "noise" not in "".join([first, *others])
    slower = analysis(Rank(copy_ms=2), Rank(copy_ms=2, loss_ms=29), sizes=[[1] * 4, [1] * 8])
    mixed = Analysis(joined([made.recording, slower.recording, made.recording, slower.recording]))
    assert words.noise_sentence(mixed) == "Noise: 20.0 ms (25%), the range of the middle half of 6 steps."
    assert any(one.endswith("shorter, within the noise.") for one in words.advice_sentences(mixed))


def test_of_one_step_no_noise_is_known_and_without_gains_there_is_no_advice() -> None:
    made = analysis(Rank(copy_ms=0, optimizer_ms=0, other_ms=0), sizes=[[1]], wire=Link(1e-9, 1e18))
    assert words.noise_sentence(made) == "Only one step was recorded, so the noise is not known."
    assert words.advice_sentences(made) == ["No change that was tried makes a step 1% shorter."]


def test_the_model_comes_with_its_error() -> None:
    (model,) = words.model_sentences(analysis(Rank(), Rank(), sizes=[[1], [2]]))
    assert "0.5 ms + its bytes at 250 MiB a second; ranks compute" in model


def test_the_history_of_a_bucket() -> None:
    """Computed by hand: each message takes 8.5 ms, and bucket 1 leaves rank 1 at 14 + 5/6 of 20 ms.

    Before that bucket 0 is in its way, which left rank 1 at 14 + 2/6 of 20 ms.
    """
    step = analysis(Rank(), Rank(late_ms=3), sizes=[[1, 1], [0.5, 1, 0.5], [2]]).typical
    histories = [[words.history(step, rank, bucket) for bucket in rank.buckets] for rank in step.ranks]
    *lines, wire = histories[0][1].splitlines()
    assert lines == [
        "2 MiB, blocks the rank for 7.67 ms",
        "its last gradient is layer4.weight",
        "queues for 1.50 ms: one bucket travels at a time",
        "waits for ranks for 1.50 ms: rank 1 joins last",
    ]
    assert wire.startswith("on the wire for 8.50 ms: ")
    assert "waits for ranks for 0.00 ms" in histories[1][2]


def test_facts_about_the_recording() -> None:
    made = recording([Rank(), Rank()], layout([[1]]))
    first, second = made.ranks
    second = replace(second, clock_error_ns=40_000, is_full=True)
    text = words.facts(replace(made, ranks=(first, second), notes=("A note.",)))
    assert text.startswith(
        "Recorded on ranks 0 and 1 (somewhere). The ranks' clocks agree within 0.04 ms. Only the"
    )
    assert text.endswith("events of a rank are kept. A note.")
    assert words.facts(made) == "Recorded on ranks 0 and 1 (somewhere)."


def test_the_wrapper_is_named_once() -> None:
    made = recording([Rank()] * 2, layout([[1]]), title="gpt")
    assert words.setting(made) == "gpt, minddp, 2 ranks on CPU, gloo"
    assert words.setting(replace(made, title="minddp")) == "minddp, 2 ranks on CPU, gloo"


# ---------------------------------------------------------------------- in the terminal


def printed(analysis: Analysis, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    words.explain(analysis, console)
    return console.file.getvalue()


def test_the_table_adds_up() -> None:
    text = printed(Analysis(recording([Rank(), Rank(late_ms=2)], layout([[1], [2]]), steps=2)))
    found = re.findall(r"^(\w.*?) {2,}([\d.]+) ms +([\d.]+) ms *$", text, re.MULTILINE)
    rows = {label: list(map(float, times)) for label, *times in found}
    parts = [activity.value for activity in Activity if activity.value in rows]
    assert len(parts) == 7
    assert {"between forward and backward", "blocked in communication", "copy averages to .grad"} < set(parts)
    sums = [sum(rows[name][k] for name in parts) for k in range(2)]
    assert sums == pytest.approx(rows["step"], abs=0.05)
    assert "\n1. " in text
    assert "This is step 0, the median of 2 steps." in text


def test_it_fits_a_terminal_and_says_what_is_left_out() -> None:
    assert max(map(len, printed(Analysis(recording([Rank()] * 3, layout([[1]])))).splitlines())) <= 80
    assert "And 2 more" in printed(Analysis(recording([Rank()] * 10, layout([[1]]))), width=200)
