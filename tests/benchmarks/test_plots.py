"""The figures as they are drawn from what is kept: everything can be read, and says what it is."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from benchmarks import question

pytest.importorskip("matplotlib")

from benchmarks.plots import DPI, PICTURES, Config, drawn, main

NAMES = [(asked, name) for asked, pictures in PICTURES.items() for name in pictures]
TOUCHING = 3  # pixels: the air around letters


def report_of(asked: str) -> dict[str, Any]:
    report = question.read(question.path_of(asked))
    assert report is not None, "kept in the repository"
    return report


def figure_of(asked: str, name: str) -> Any:
    return drawn(PICTURES[asked][name](report_of(asked)), report_of(asked))


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


def test_bucket_sizes_have_a_panel_for_each_workload_and_a_key_of_the_families() -> None:
    figure = figure_of("bucket_size", "bucket_size")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [result["title"] for result in report_of("bucket_size")["workloads"].values()]
    (key,) = figure.legends
    assert [text.get_text() for text in key.get_texts()] == [
        "torch",
        "minddp by the process group",
        "by shared memory",
    ]


def test_figures_and_tables_are_made_from_the_results_that_exist(tmp_path: Path) -> None:
    question.write(report_of("hook_cost"), question.path_of("hook_cost", tmp_path))
    main(Config(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"hook_cost.json", "hook_cost.png", "tables.md"}
    page = (tmp_path / "tables.md").read_text()
    assert page.startswith("## hook_cost\n\n20 rounds, paired; 1 rank on one host;")
    assert "### 1,000 parameters, nothing communicated" in page
