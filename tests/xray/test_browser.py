"""The page in a real Chromium: with a mouse, with a keyboard, narrow, light and dark, and without a network.

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

from minddp.xray.analysis import Analysis
from minddp.xray.page import render
from tests.xray.made_up import MIB, MS, Rank, Wire, layout, recording

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

PLAN = layout([[1, 1], [0.5, 1, 0.5], [2]], names=[f"blocks.{i}.weight" for i in range(6)])
SLOW = Wire(latency_ns=MS // 2, bytes_per_ms=MIB / 4)
MADE = recording([Rank(), Rank(late_ms=3)], PLAN, steps=3, wire=SLOW, title="three buckets")
FILLS = ("forward", "backward", "wire", "exposed", "optimizer", "quiet", "other")
OTHER = recording([Rank(), Rank()], layout([[6]]), wire=SLOW, title="one bucket")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Seen:
    """A page that is open, and whatever it complained about or asked for."""

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

    def selected(self) -> str:
        return self.text("#bucket-title").split("\n")[0]

    def axis(self) -> list[str]:
        return self.page.eval_on_selector_all(
            "#timeline svg > g:first-of-type text", "all => all.map(t => t.textContent)"
        )

    def press(self, *keys: str) -> None:
        self.page.focus("#timeline")
        for key in keys:
            self.page.keyboard.press(key)

    def photograph(self, name: str) -> None:
        if folder := os.environ.get("MINDDP_SCREENSHOTS"):
            self.page.screenshot(path=Path(folder, f"{name}.png"), full_page=True)

    def close(self) -> None:
        self.context.close()
        assert self.complaints == []
        assert all(url.startswith(("file:", "data:")) for url in self.requests)


@pytest.fixture
def seen(browser: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Seen]:
    options = getattr(request, "param", {})
    analyses = [Analysis(MADE), Analysis(OTHER)] if options.get("both") else [Analysis(MADE)]
    page = Seen(browser, render(analyses), tmp_path, **{k: v for k, v in options.items() if k != "both"})
    yield page
    page.photograph(request.node.name)
    page.close()


def test_the_first_view_says_what_there_is_to_see(seen: Seen) -> None:
    assert seen.page.title() == "three buckets: minddp x-ray"
    assert re.fullmatch(r"A step takes \S+ ms, of which rank 0 waits \S+ ms for gradients\.", seen.text("h1"))
    assert "What to try:" in seen.text("#suggestion")
    assert seen.page.locator("#timeline .bucket").count() == 2 * 3
    assert "What sticks out behind it, the rank stands still for." in seen.text(".how")
    drawn = seen.page.eval_on_selector_all("#timeline svg text", "all => all.map(t => t.textContent)")
    assert {"rank 0", "rank 1", "forward", "backward", "stands still"} <= set(drawn)
    assert "All ranks read one clock." in seen.text("#facts")


def test_it_begins_with_the_bucket_that_hurts_most(seen: Seen) -> None:
    worst = re.search(r"Bucket (\d) hurts most: rank (\d)", seen.text("#sentences"))
    assert worst is not None
    assert seen.selected().startswith(f"Bucket {worst[1]}, rank {worst[2]}")
    assert "blocks." in seen.text("#bucket table")


def test_a_click_on_a_bucket_tells_its_life(seen: Seen) -> None:
    seen.page.locator("#timeline .bucket[data-bucket='1']").first.click()
    assert seen.selected().startswith("Bucket 1, rank 0")
    assert "3 gradients" in seen.text("#bucket .life")
    assert "on the wire" in seen.text("#bucket .life")
    assert seen.page.locator("#bucket tbody tr").count() == 3
    assert seen.page.locator("#timeline .outline").count() == 2, "the same bucket is marked on both ranks"


def test_what_lies_under_the_mouse_is_named(seen: Seen) -> None:
    seen.page.locator("#timeline rect.backward").first.hover()
    assert seen.text("#tip").split("\n")[0] == "backward"
    seen.page.locator("#timeline .bucket[data-bucket='2']").first.hover()
    assert "bucket 2, rank 0" in seen.text("#tip")
    seen.page.mouse.move(5, 5)
    assert not seen.page.is_visible("#tip")


def test_arrow_keys_go_from_bucket_to_bucket_and_rank_to_rank(seen: Seen) -> None:
    seen.press("ArrowLeft", "ArrowLeft", "ArrowLeft")
    assert seen.selected().startswith("Bucket 0, rank 0")
    seen.press("ArrowRight", "ArrowDown")
    assert seen.selected().startswith("Bucket 1, rank 1")
    assert seen.text("#announcement").startswith("Bucket 1, rank 1: fills")
    seen.press("ArrowUp", "ArrowUp")
    assert seen.selected().startswith("Bucket 1, rank 0")


def test_keys_zoom_and_fit(seen: Seen) -> None:
    whole = seen.axis()
    seen.press("+", "+")
    assert seen.axis() != whole
    assert len(seen.axis()) > 2
    seen.press("0")
    assert seen.axis() == whole
    seen.press("-")
    assert seen.axis() == whole, "there is nothing outside the step to be seen"


def test_the_wheel_zooms_where_the_mouse_is_and_dragging_moves(seen: Seen) -> None:
    box = seen.page.locator("#timeline").bounding_box()
    assert box is not None
    seen.page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 60)
    seen.page.keyboard.down("Control")
    seen.page.mouse.wheel(0, -240)
    seen.page.keyboard.up("Control")
    seen.page.wait_for_function("() => document.querySelector('#timeline svg text').textContent !== '0'")
    zoomed = seen.axis()
    seen.page.mouse.down()
    seen.page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 60, steps=5)
    seen.page.mouse.up()
    moved = seen.axis()
    assert float(moved[0]) > float(zoomed[0])
    assert seen.page.evaluate("scrollY") == 0


def test_a_plain_wheel_scrolls_the_page(seen: Seen) -> None:
    whole = seen.axis()
    box = seen.page.locator("#timeline").bounding_box()
    assert box is not None
    seen.page.mouse.move(box["x"] + 300, box["y"] + 60)
    seen.page.mouse.wheel(0, 300)
    seen.page.wait_for_function("() => scrollY > 100")
    assert seen.axis() == whole


def test_other_steps_can_be_seen(seen: Seen) -> None:
    assert seen.page.locator("#steps button").count() == 3
    before = seen.text("#steps .label")
    seen.press("]")
    assert seen.text("#steps .label") != before
    assert seen.page.locator("#steps button[aria-pressed=true]").count() == 1
    assert not seen.page.is_visible("#plans"), "predictions are for the median step"
    seen.press("[")
    assert seen.page.is_visible("#plans")


def test_another_plan_is_drawn_beside_the_recorded_one(seen: Seen) -> None:
    seen.page.locator("#plans label", has_text="one bucket").click()
    assert "bucket_cap_mb=6" in seen.text(".plan-code")
    assert seen.page.locator("#plan-chart .bucket").count() == 3 + 1
    seen.page.keyboard.press("ArrowDown")
    assert seen.page.locator("#plan-chart .bucket").count() != 3 + 1
    seen.page.locator("#plans label", has_text="as recorded").click()
    assert seen.page.locator("#plan-chart .bucket").count() == 3 + 3


@pytest.mark.parametrize("seen", [{"viewport": {"width": 375, "height": 700}, "has_touch": True}], indirect=True)
def test_a_narrow_window_needs_no_sideways_scrolling(seen: Seen) -> None:
    assert seen.page.evaluate("document.documentElement.scrollWidth") == 375
    assert seen.page.locator("#timeline .bucket").count() == 6
    seen.page.locator("#timeline .bucket[data-bucket='0']").first.tap()
    assert seen.selected().startswith("Bucket 0, rank 0")


@pytest.mark.parametrize("seen", [{"color_scheme": "light"}, {"color_scheme": "dark"}], indirect=True, ids=str)
def test_text_can_be_read_in_light_and_dark(seen: Seen) -> None:
    """WCAG 2: text 4.5, shapes 3 against what lies behind them."""
    colors = seen.page.evaluate(
        """names => { const style = getComputedStyle(document.documentElement);
        return Object.fromEntries(names.map(name => [name, style.getPropertyValue("--" + name).trim()])); }""",
        ["page", "card", "ink", "soft", "exposed-pale", "tick", *FILLS, *(f"on-{name}" for name in FILLS)],
    )
    texts = [("ink", "page"), ("ink", "card"), ("soft", "page"), ("soft", "card"), ("exposed", "exposed-pale")]
    texts += [(f"on-{name}", name) for name in FILLS]
    for front, back in texts:
        assert contrast(colors[front], colors[back]) >= (3 if front == "exposed" else 4.5), (front, back)
    for shape in ("forward", "backward", "wire", "exposed", "optimizer", "tick"):
        assert contrast(colors[shape], colors["card"]) >= 3, shape


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    parts = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("seen", [{"color_scheme": "dark"}], indirect=True)
def test_the_theme_is_the_systems_until_it_is_switched(seen: Seen) -> None:
    dark = seen.style("body", "backgroundColor")
    seen.page.click("#theme")
    light = seen.style("body", "backgroundColor")
    assert sum(map(int, re.findall(r"\d+", light)[:3])) > 600 > 200 > sum(map(int, re.findall(r"\d+", dark)[:3]))


@pytest.mark.parametrize("seen", [{"both": True}], indirect=True)
def test_recordings_side_by_side(seen: Seen) -> None:
    assert re.fullmatch(r"three buckets takes \S+ ms a step, one bucket \S+ ms\.", seen.text("h1"))
    assert seen.page.locator("#comparison tbody tr").count() == 2
    assert seen.page.locator("#timeline .bucket").count() == 6 + 2
    assert not seen.page.is_visible("#plans")
    seen.press(*["ArrowDown"] * 3)
    assert seen.selected().startswith("Bucket 0, one bucket, rank 1")


def test_many_ranks_are_shown_when_asked_for(browser: Any, tmp_path: Path) -> None:
    many = Analysis(recording([Rank()] * 12, PLAN))
    seen = Seen(browser, render([many]), tmp_path)
    assert seen.page.locator("#timeline .bucket").count() == 8 * 3
    seen.page.click("text=Show 4 more ranks")
    assert seen.page.locator("#timeline .bucket").count() == 12 * 3
    seen.close()
