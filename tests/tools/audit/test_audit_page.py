"""The page in a real Chromium, wide and narrow. Set MINDDP_SCREENSHOTS to a folder to keep what was seen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool
from tests.tools.audit import scripts
from tests.tools.xray.test_browser import CHROMIUM, browser

__all__ = ["browser"]  # a fixture
pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]


def save_page(rank: int, name: str, path: str) -> None:
    audit, *_ = scripts.SCRIPTS[name](scripts.Place(rank, 7))
    if rank == 0:
        audit.report.save(path)


@pytest.mark.parametrize("width", [1280, 380])
@pytest.mark.parametrize("name", ["some_parameters_left_out", "right_clipped", "mean_of_means_accumulated"])
def test_the_page(browser: Any, ranks: Any, tmp_path: Path, name: str, width: int) -> None:
    pool: RankPool = ranks(2)
    pool.run(save_page, name, str(path := tmp_path / "audit.html"))
    page = browser.new_page(viewport={"width": width, "height": 800})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(path.as_uri())
    if folder := os.environ.get("MINDDP_SCREENSHOTS"):
        page.screenshot(path=Path(folder, f"{name}-{width}.png"), full_page=True)
    assert complaints == []
    assert page.title() == "audit: minddp audit"
    assert page.locator("h1.warning").count() == (name != "right_clipped")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("td").first.inner_text() == "rank 0"
