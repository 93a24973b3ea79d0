"""The page in a real Chromium: narrow, light and dark, and without a network.

Set MINDDP_SCREENSHOTS to a folder to keep what was seen.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minddp.tools.forecast.link import Link
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.page import render
from tests.tools.xray.made_up import MIB, SLOW, Rank, layout, recording

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


PLAN = layout([[1, 1], [0.5, 1, 0.5], [2]], names=[f"blocks.{i}.weight" for i in range(6)])
PAIR = [Rank(), Rank(late_ms=1)]
SHOWN = {
    "made": recording([Rank(), Rank(late_ms=3)], PLAN, steps=3, wire=SLOW, title="three buckets"),
    "sixty buckets": recording(
        PAIR, layout([[0.05] * 3] * 60), wire=Link(0.05e-3, 9000 * MIB), title="sixty buckets"
    ),
    "long names": recording(PAIR, layout([[1] * 9], names=[f"module.{i}.{'encoder.' * 20}" for i in range(9)])),
}
NARROW = {"viewport": {"width": 380, "height": 700}}


def shown(name: str = "made", **context: Any) -> pytest.MarkDecorator:
    """The page that a test sees: of what, and in what browser."""
    return pytest.mark.parametrize("seen", [(name, context)], indirect=True, ids=[name])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Seen:
    """An open page, its errors and its requests."""

    def __init__(self, browser: Any, html: str, folder: Path, **context: Any):
        (folder / "page.html").write_text(html, encoding="utf-8")
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto((folder / "page.html").as_uri())

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def style(self, selector: str, name: str) -> str:
        return self.page.eval_on_selector(selector, f"node => getComputedStyle(node).{name}")

    def bars(self, selector: str) -> list[tuple[float, float]]:
        """From where to where they reach on the page, from left to right."""
        return self.page.eval_on_selector_all(
            selector,
            "all => all.map(n => n.getBoundingClientRect()).map(b => [b.left, b.right]).sort(([a], [b]) => a - b)",
        )

    def photograph(self, name: str) -> None:
        if folder := os.environ.get("MINDDP_SCREENSHOTS"):
            self.page.screenshot(path=Path(folder, f"{name}.png"), full_page=True)

    def close(self) -> None:
        self.context.close()
        assert self.complaints == []
        assert all(url.startswith(("file:", "data:")) for url in self.requests)


@pytest.fixture
def seen(browser: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Seen]:
    name, context = getattr(request, "param", ("made", {}))
    page = Seen(browser, render(Analysis(SHOWN[name])), tmp_path, **context)
    yield page
    page.photograph(re.sub(r"\W+", "-", request.node.name))
    page.close()


def test_the_first_view_says_what_there_is_to_see(seen: Seen) -> None:
    assert seen.page.title() == "three buckets: minddp x-ray"
    waits = r"Rank 0 waits \S+ ms for rank 1, which spends 3.00 ms more in other work\."
    assert re.fullmatch(rf"Step: \S+ ms\. Exposed communication: \S+ ms\. {waits}", seen.text("h1"))
    assert seen.page.locator("#timeline .bucket").count() == 2 * 3
    assert "Recorded on ranks 0 and 1 (somewhere)." in seen.text("footer")
    assert re.search(r"waiting for a slower rank\s+3.00 ms\s+0.00 ms", seen.text("main"))


def test_what_is_red_is_what_a_rank_is_blocked_by(seen: Seen) -> None:
    """The wires of made-up ranks are never idle while one waits: two rows, the same red."""
    red, still = seen.bars("#timeline .moves-exposed"), seen.bars("#timeline .exposed")
    assert len(red) == len(still) == 2 * 2
    for (left, right), (begin, end) in zip(red, still, strict=True):
        assert left == pytest.approx(begin, abs=2)
        assert right == pytest.approx(end, abs=2)
    color = "backgroundColor"
    assert seen.style("#timeline .moves-exposed", color) != seen.style("#timeline .moves", color)


def test_while_backward_runs_a_bucket_waits_for_ranks_without_cost(seen: Seen) -> None:
    """Rank 1 is 3 ms late."""
    (left, right), *_ = seen.bars("#timeline .waits")
    whole = seen.bars("#timeline .backward")[0]
    assert (right - left) / (whole[1] - whole[0]) == pytest.approx(3 / 20, abs=0.01)
    assert seen.page.locator("#timeline .waits-exposed").count() == 0


@shown("sixty buckets")
def test_buckets_that_hardly_last_can_be_seen(seen: Seen) -> None:
    assert seen.page.locator("#timeline .bucket").count() == 2 * 60
    assert min(right - left for left, right in seen.bars("#timeline .bucket")) >= 2.4


@pytest.mark.parametrize("seen", [("made", {}), ("long names", NARROW)], indirect=True, ids=str)
def test_no_text_of_a_chart_is_cut_off(seen: Seen) -> None:
    """Words that have no room are below their box, where they are not drawn."""
    words = """all => all.flatMap(node => [...node.childNodes].flatMap(child => {
        const box = node.parentNode.getBoundingClientRect();
        const range = document.createRange();
        range.selectNodeContents(child);
        return [...range.getClientRects()].filter(at => at.width && at.top < box.bottom - 1)
            .map(at => [child.textContent, at.left, at.right, box.left, box.right]);
    }))"""
    texts = seen.page.eval_on_selector_all("#timeline .fitted", words)
    assert len(texts) > 4
    for text, left, right, least, most in texts:
        assert least - 0.5 <= left <= right <= most + 0.5, text


@pytest.mark.parametrize(
    "seen", [("made", NARROW), ("long names", NARROW), ("sixty buckets", NARROW)], indirect=True, ids=str
)
def test_a_narrow_page_does_not_scroll_sideways(seen: Seen) -> None:
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("seen", [("made", {"color_scheme": c}) for c in ("light", "dark")], indirect=True, ids=str)
def test_text_stands_out_in_light_and_dark(seen: Seen) -> None:
    """WCAG: a contrast of 4.5 at least."""

    def luminance(color: str) -> float:
        shares = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
        parts = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for name in ("forward", "backward", "moves", "moves-exposed", "optimizer", "other", "exposed"):
        inks, grounds = (seen.style(f"#timeline .{name}", color) for color in ("color", "backgroundColor"))
        low, high = sorted(map(luminance, (inks, grounds)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, name
