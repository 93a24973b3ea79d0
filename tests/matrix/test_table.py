"""Rows of docs/versions.md from what pytest prints."""

from __future__ import annotations

import pytest

from tests.matrix.table import HEADER, UPSTREAM, Row, UpstreamRow, merged, row_of

OUTPUT = """\
..F.s
FAILED tests/core/test_plan.py::test_order[a|b] - assert 1 == 2
ERROR tests/core/test_bucket.py
1 failed, 12 passed, 3 skipped, 1 error in 4.56s
"""
PAGE = f"Before.\n\n{HEADER}| 2.13.0+cpu | 3.11 | 2026-01-01 | 5 | 0 | 0 |  |\n\nAfter.\n"


def test_counts_and_names_are_read() -> None:
    row = row_of("2.15.0", "3.11", "2026-11-22", OUTPUT)
    named = "`core/test_plan.py::test_order[a b]`, `core/test_bucket.py`"
    assert str(row) == f"| 2.15.0 | 3.11 | 2026-11-22 | 12 | 2 | 3 | {named} |"


def test_a_run_that_was_cut_short_passes_nothing() -> None:
    assert "not run: pytest did not come to an end" in str(row_of("2.15.0", "3.11", "2026-11-22", "..F.s\n"))


def test_a_row_names_the_folders_if_they_were_not_all() -> None:
    assert str(row_of("2.11.0", "3.11", "2026-11-22", "5 passed in 1s", ("core", "modes"))).endswith(
        "| 5 | 0 | 0 | of core modes only |"
    )


def test_rows_replace_their_own_and_keep_the_others() -> None:
    newest = Row("2.15.0", "3.11", "2026-11-22", {"passed": 7})
    page = merged(PAGE, [newest])
    assert page.splitlines()[4:6] == [str(newest), "| 2.13.0+cpu | 3.11 | 2026-01-01 | 5 | 0 | 0 |  |"]
    again = merged(page, [Row("2.15.0", "3.11", "2026-11-23", {"passed": 8})])
    assert again.count("2.15.0") == 1
    assert "| 8 | 0 | 0 |" in again
    assert again.startswith("Before.\n\n")
    assert again.endswith("\n\nAfter.\n")
    assert merged(again, []) == again


def test_tables_of_one_page_are_renewed_apart() -> None:
    page = f"{PAGE}\n{UPSTREAM}| 2.13.0+cpu | 3.11 | 2026-01-01 | 92 | 92 | 92 |\n"
    renewed = merged(page, [UpstreamRow("2.13.0+cpu", "3.11", "2026-11-23", 92, 91, 90)], UPSTREAM)
    assert renewed == page.replace("2026-01-01 | 92 | 92 | 92 |", "2026-11-23 | 92 | 91 | 90 |")
    again = merged(renewed, [Row("2.13.0+cpu", "3.11", "2026-11-23", {"passed": 8})])
    assert again == renewed.replace("2026-01-01 | 5 |", "2026-11-23 | 8 |")
    with pytest.raises(ValueError, match="has no table"):
        merged("Before.", [], UPSTREAM)


def test_a_row_of_frameworks_says_which_they_are() -> None:
    row = row_of("2.15.0", "3.11", "2026-11-23", "5 passed in 1s", packages=("accelerate 1.15.0",))
    assert str(row).endswith("| 5 | 0 | 0 | accelerate 1.15.0 |")
