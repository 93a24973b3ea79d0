"""The table of hooks that send fewer bytes: what it says, and that the page shows the kept measurement."""

from __future__ import annotations

import pytest

from benchmarks import question
from benchmarks.fewer_bytes import BASELINE, PAGE, tables, with_table


def report_of(rates: tuple[str, ...]) -> dict:
    def hook(share: float, losses: list[float]) -> dict:
        timed = {rate: {"ms": 100 * share, "ratio": {"median": share}} for rate in rates}
        return {"bytes": 2e6 * share, "losses": losses, "curve": [3.0, 2.0], **timed}

    return {"config": {"rates": rates}, "hooks": {BASELINE: hook(1, [2.0, 4.0]), "halves": hook(0.5, [2.2, 4.0])}}


def test_a_row_has_bytes_times_and_the_change_of_the_loss_by_seed() -> None:
    [table] = tables(report_of(("1gbit",)))
    assert table.headings[2] == "ms at 1gbit"
    assert table.rows[1] == ["halves", "1,000 (0.500)", "50.0 (0.50)", "3.1000", "+5.0% (+0.0% to +10.0%)"]


def test_the_page_gets_the_table_between_its_markers() -> None:
    page = "a\n<!-- fewer_bytes -->\nold\n<!-- end of fewer_bytes -->\nb\n"
    filled = with_table(page, report_of(("1gbit",)))
    assert filled.startswith("a\n<!-- fewer_bytes -->\n### Hooks")
    assert filled.endswith("|\n<!-- end of fewer_bytes -->\nb\n")
    assert "old" not in filled
    assert with_table(filled, report_of(("1gbit",))) == filled


def test_the_page_shows_the_kept_measurement() -> None:
    report = question.read(question.path_of("fewer_bytes"))
    assert report is not None
    assert with_table(PAGE.read_text(), report) == PAGE.read_text()


def test_the_picture_has_a_panel_for_bytes_and_one_for_each_rate() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plots import losses

    report = question.read(question.path_of("fewer_bytes"))
    assert report is not None
    labels = [axes.get_xlabel() for axes in losses(report).axes]
    assert labels == ["MB sent by a host", *(f"seconds at {rate}" for rate in report["config"]["rates"])]
