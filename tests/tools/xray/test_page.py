from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

import minddp.tools.xray.page
from minddp.tools.forecast.link import Link
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.page import MARKS, marks, render
from tests.tools.xray.made_up import MIB, MS, Rank, layout, recording

MADE = recording([Rank(), Rank(late_ms=4)], layout([[1, 1], [2]]), steps=2, wire=Link(1e-3, 500 * MIB))


def test_the_page_needs_no_network() -> None:
    page = render(Analysis(MADE))
    assert re.findall(r"(?:src|href)=\"(?!data:)", page) == []
    assert "@import" not in page
    assert page.count("http") == 1  # http-equiv
    assert "default-src 'none'" in page
    assert not re.search(r"{{|{%", page)


def test_names_cannot_break_the_page() -> None:
    evil = "</script><b>&\"'{{JS}}"
    page = render(Analysis(recording([Rank()], layout([[1]], names=[evil]), title="<i>&{{DATA}}</i>")))
    assert "</script>" not in page
    assert "<title>&lt;i&gt;&amp;{{DATA}}&lt;/i&gt;" in page
    assert "its last gradient is &lt;/script&gt;&lt;b&gt;&amp;" in page


def test_a_model_that_misjudges_the_step_is_a_warning() -> None:
    made = Analysis(MADE)
    assert "Do not rely" not in render(made)
    vars(made)["predicted_ns"] = 1.2 * made.typical.length_ns
    assert '<p class="warning">Do not rely on these predictions' in render(made)


def test_all_files_of_the_page_are_in_the_package() -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["minddp.tools.xray.page"]
    names = {file.name for file in Path(minddp.tools.xray.page.__file__).parent.iterdir() if file.is_file()}
    of_page = {name for name in names if not name.endswith(".py")}
    assert of_page == {name for name in of_page if any(fnmatch(name, pattern) for pattern in patterns)}


def test_times_are_shares_of_the_step() -> None:
    """Rank 1 is 4 ms late."""
    length_ms = (Analysis(MADE).typical.end_ns - Analysis(MADE).typical.begin_ns) / MS
    for begin_ms in (0, 4):
        style = f"left:{100 * begin_ms / length_ms:.4f}%;width:{100 * 10 / length_ms:.4f}%"
        assert f'<div class="forward" style="{style}"' in render(Analysis(MADE))


@pytest.mark.parametrize("length_ms", [0.07, 1, 38.5, 50, 99, 1234])
def test_the_axis_has_round_marks(length_ms: float) -> None:
    found = list(marks(round(length_ms * MS)))
    assert MARKS / 3 < len(found) <= MARKS + 1
    for share, label in found:
        assert share == pytest.approx(float(label.removesuffix(" ms")) / length_ms, abs=1e-3)
        assert 0 <= share <= 1
