"""The table of hooks that send fewer bytes: what it says, and that the page shows the kept measurement."""

from __future__ import annotations

from benchmarks import question
from benchmarks.fewer_bytes import BASELINE, tables


def report_of(rates: tuple[str, ...]) -> dict:
    def hook(share: float, losses: list[float]) -> dict:
        timed = {rate: {"ms": 100 * share, "ratio": {"median": share}} for rate in rates}
        return {"bytes": 2e6 * share, "losses": losses, **timed}

    return {
        "config": {"rates": rates, "steps": 2},
        "hooks": {BASELINE: hook(1, [2.0, 4.0]), "halves": hook(0.5, [2.2, 4.0])},
    }


def test_a_row_has_bytes_times_and_the_change_of_the_loss_by_seed() -> None:
    [table] = tables(report_of(("1gbit",)))
    assert table.headings[2] == "ms at 1gbit"
    assert table.rows[1] == ["halves", "1,000 (0.500)", "50.0 (0.50)", "3.1000", "+5.0% (+0.0% to +10.0%)"]


def test_the_page_shows_the_kept_measurement() -> None:
    report = question.read(question.path_of("fewer_bytes"))
    assert report is not None
    [table] = tables(report)
    assert table.markdown() in (question.RESULTS.parents[1] / "docs" / "hooks.md").read_text()
