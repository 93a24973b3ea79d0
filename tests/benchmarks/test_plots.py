"""The figures as they are drawn from what is kept: everything can be read, and says what it is."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from benchmarks import question

pytest.importorskip("matplotlib")

from benchmarks.plots import DPI, PICTURES, Config, main, rounds_of

KEPT = [asked for asked in PICTURES if question.path_of(asked).exists()]  # the others have not been measured yet
NAMES = [(asked, name) for asked in KEPT for name in PICTURES[asked]]
TOUCHING = 3  # pixels: the air around letters


def report_of(asked: str) -> dict[str, Any]:
    report = question.read(question.path_of(asked))
    assert report is not None, "kept in the repository"
    return report


def figure_of(asked: str, name: str) -> Any:
    return PICTURES[asked][name](report_of(asked))


def words_of(figure: Any) -> dict[str, Any]:
    """All that is written on the sheet, as it is saved, and where; without marks outside of a scale."""
    from matplotlib.text import Text

    figure.set_dpi(DPI)
    figure.draw_without_rendering()
    texts = [*figure.texts, *(text for key in figure.legends for text in (key.get_title(), *key.get_texts()))]
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


@pytest.mark.parametrize(("asked", "name"), NAMES, ids=[name for _, name in NAMES])
def test_all_words_lie_within_the_sheet_and_beside_each_other(asked: str, name: str) -> None:
    figure = figure_of(asked, name)
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


@pytest.mark.parametrize(("asked", "name"), NAMES, ids=[name for _, name in NAMES])
def test_every_figure_names_its_units_and_its_machine(asked: str, name: str) -> None:
    figure, machine = figure_of(asked, name), report_of(asked)["machine"]
    said = figure.get_supxlabel()
    assert all(f"{machine[of]}" in said for of in ("cpu", "torch", "python"))
    for axes in figure.axes:
        below = axes.get_subplotspec().is_last_row() or axes is figure.axes[-1]
        assert axes.get_xlabel() or not below
    assert figure.axes[0].get_ylabel() or figure.axes[0].get_yticklabels()[0].get_text()[0].isalpha()


def test_step_times_have_a_panel_for_each_workload_and_a_key_of_the_transports() -> None:
    figure = figure_of("versus_torch", "ratio")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [result["title"] for result in report_of("versus_torch")["workloads"].values()]
    (key,) = figure.legends
    words = [text.get_text() for text in key.get_texts()]
    assert words == ["● minddp by the process group", "● by shared memory", "○ as it comes"]


def test_figures_and_tables_are_made_from_the_results_that_exist(tmp_path: Path) -> None:
    for asked in ("all_reduce", "versus_torch"):
        question.write(report_of(asked), question.path_of(asked, tmp_path))
    main(Config(tmp_path))
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"all_reduce.json", "versus_torch.json", "ratio.png", "tables.md"}
    page = (tmp_path / "tables.md").read_text()
    assert "## all_reduce\n\n" in page


def test_the_rounds_that_a_page_names_are_those_that_were_measured() -> None:
    report = {"workloads": {"a": {"rounds": 2, "ratio": {"rounds": 2}}, "b": [{"rounds": 26}]}, "rounds": 3}
    assert rounds_of(report) == {2, 3, 26}
    assert rounds_of({"rounds_ms": [1.0, 2.0], "title": "x"}) == set()


def test_results_that_the_readme_shows_are_kept() -> None:
    """A question without kept results is fine as long as README quotes nothing of it."""
    readme = (question.RESULTS.parents[1] / "README.md").read_text()
    quoted = set(re.findall(r"benchmarks ([a-z_]+)`", readme))
    shown = set(re.findall(r"benchmarks/results/([a-z_]+)\.png", readme))
    assert quoted
    assert shown
    assert [asked for asked in quoted if question.read(question.path_of(asked)) is None] == []
    assert shown <= {name for asked in KEPT for name in PICTURES[asked]}
