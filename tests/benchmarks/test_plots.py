"""The figures as they are drawn from what is kept: everything can be read, and says what it is."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from benchmarks import results

pytest.importorskip("matplotlib")

from benchmarks.plots import DPI, FIGURES_OF_QUESTION

NAMES = [(question, name) for question, figures in FIGURES_OF_QUESTION.items() for name in figures]
TOUCHING = 3  # pixels: the air around letters


def report_of(question: str) -> dict[str, Any]:
    report = results.read(results.path_of(question))
    assert report is not None, "kept in the repository"
    return report


def drawn(question: str, name: str) -> Any:
    return FIGURES_OF_QUESTION[question][name](report_of(question))


def words_of(figure: Any) -> dict[str, Any]:
    """All that is written on the sheet, as it is saved, and where; without marks outside of a scale."""
    from matplotlib.text import Text

    figure.set_dpi(DPI)
    figure.draw_without_rendering()
    texts = [*figure.texts, *(text for key in figure.legends for text in key.get_texts())]
    for axes in figure.axes:
        texts += [
            axes.xaxis.label,
            axes.yaxis.label,
            *(part for part in axes.get_children() if isinstance(part, Text)),
        ]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return {
        f"{number}: {text.get_text()}": text.get_window_extent()
        for number, text in enumerate(texts)
        if text.get_text()
    }


@pytest.mark.parametrize(("question", "name"), NAMES, ids=[name for _, name in NAMES])
def test_all_words_lie_within_the_sheet_and_beside_each_other(question: str, name: str) -> None:
    figure = drawn(question, name)
    places = words_of(figure)
    assert len(places) > 5
    outside = [word for word, at in places.items() if min(at.min) < 0 or any(at.max > figure.bbox.max)]
    assert outside == []
    overlapping = [
        (one, other)
        for (one, its), (other, others) in combinations(places.items(), 2)
        if all(
            min(a, b) - max(c, d) > TOUCHING
            for a, b, c, d in zip(its.max, others.max, its.min, others.min, strict=True)
        )
    ]
    assert overlapping == []


@pytest.mark.parametrize(("question", "name"), NAMES, ids=[name for _, name in NAMES])
def test_every_figure_names_its_units_and_its_machine(question: str, name: str) -> None:
    figure, machine = drawn(question, name), report_of(question)["machine"]
    said = "\n".join(text.get_text() for text in figure.texts)
    assert all(f"{machine[of]}" in said for of in ("cpu", "torch", "python"))
    for axes in figure.axes:
        below = axes.get_subplotspec().is_last_row() or axes is figure.axes[-1]
        assert axes.get_xlabel() or not below
    assert figure.axes[0].get_ylabel() or figure.axes[0].get_yticklabels()[0].get_text()[0].isalpha()


def test_memory_says_which_workload_a_point_is_of() -> None:
    report = report_of("memory")
    titles = [axes.get_title(loc="left") for axes in drawn("memory", "memory").axes]
    assert titles == [w["title"] for name, w in report["workloads"].items() if not name.endswith("sparse")]


def test_bucket_sizes_say_which_transport_they_mean() -> None:
    (key,) = drawn("bucket_size", "bucket_size").legends
    said = [text.get_text() for text in key.get_texts()]
    assert said == ["torch", "minddp by the process group", "minddp by shared memory, as it comes"]
