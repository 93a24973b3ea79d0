"""The page shows real outputs: late ranks that are named, and a table in which most of each delay is found."""

from __future__ import annotations

import re

from docs.learning.quotes import blocks
from tests.tools.watchdog.late_page import DELAYS_MS, PAGE, WORLD_SIZES

SHOWN = blocks(PAGE.read_text())


def test_the_sentence_names_the_late_rank() -> None:
    pattern = r"```text\nRank 2 is late: 4\d\.\d ms in each step, 4\d\.\d ms of it between steps\. .*\n```\n"
    assert re.fullmatch(pattern, SHOWN['played("between")'])


def test_at_least_80_percent_of_each_delay_is_found() -> None:
    rows = [line.split() for line in SHOWN["matrix()"].splitlines()[2:-1]]
    assert [(int(row[0]), int(row[1])) for row in rows] == [(n, ms) for n in WORLD_SIZES for ms in DELAYS_MS]
    for row in rows:
        assert len(row) == 3 + 4
        assert all(80 <= int(cell.removesuffix("%")) <= 120 for cell in row[3:]), row
