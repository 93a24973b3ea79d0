"""The figure as it is drawn from what is kept: everything can be read, and says what it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import question

pytest.importorskip("matplotlib")

from benchmarks.plots import Config, main, ratios


def report_of(asked: str) -> dict[str, Any]:
    report = question.read(question.path_of(asked))
    assert report is not None, "kept in the repository"
    return report


def test_step_times_have_a_panel_for_each_workload_and_a_key_of_the_transports() -> None:
    figure = ratios(report_of("versus_torch"))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [result["title"] for result in report_of("versus_torch")["workloads"].values()]
    (key,) = figure.legends
    words = [text.get_text() for text in key.get_texts()]
    assert words == ["● minddp by the process group", "● by shared memory", "○ as it comes"]


def test_the_figure_and_tables_are_made_from_the_results_that_exist(tmp_path: Path) -> None:
    for asked in ("collectives", "versus_torch"):
        question.write(report_of(asked), question.path_of(asked, tmp_path))
    main(Config(tmp_path))
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"collectives.json", "versus_torch.json", "ratio.png", "tables.md"}
    page = (tmp_path / "tables.md").read_text()
    assert "## collectives\n\n" in page


def test_results_that_the_page_of_figures_shows_are_kept() -> None:
    """A question without kept results is fine as long as the page quotes nothing of it."""
    page = (question.RESULTS.parents[1] / "docs" / "figures.md").read_text()
    quoted = set(re.findall(r"benchmarks ([a-z_]+)`", page))
    assert quoted
    assert [asked for asked in quoted if question.read(question.path_of(asked)) is None] == []
