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

from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.page import render
from tests.tools.xray.made_up import MIB, MS, Rank, Wire, joined, layout, recording
from tests.tools.xray.test_page import interrupted

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

PLAN = layout([[1, 1], [0.5, 1, 0.5], [2]], names=[f"blocks.{i}.weight" for i in range(6)])
SLOW = Wire(latency_ns=MS // 2, bytes_per_ms=MIB / 4)
MADE = recording([Rank(), Rank(late_ms=3)], PLAN, steps=3, wire=SLOW, title="three buckets")
OTHER = recording([Rank(), Rank()], layout([[6]]), wire=SLOW, title="one bucket")
PAIR = [Rank(), Rank(late_ms=1)]
SHOWN = {
    "made": [MADE],
    "both": [MADE, OTHER],
    "fifty steps": [recording(PAIR, PLAN, steps=50, wire=SLOW, title="fifty steps")],
    "sixty buckets": [
        recording(PAIR, layout([[0.05] * 3] * 60), wire=Wire(MS // 20, 9 * MIB), title="sixty buckets")
    ],
    "cut short": [interrupted(MADE)],
    "misjudged": [joined([recording(PAIR, PLAN, wire=wire) for wire in (SLOW, Wire(MS, MIB / 8))])],
    "evil": [recording(PAIR, layout([[1]], names=["</script>{{JS}}<b>&\"'`"]), wire=SLOW, title="<i>&{{DATA}}")],
    "long names": [recording(PAIR, layout([[1] * 9], names=[f"module.{i}.{'encoder.' * 20}" for i in range(9)]))],
}
FILLS = ("forward", "backward", "wire", "exposed", "optimizer", "quiet", "other")
NARROW = {"viewport": {"width": 380, "height": 700}}
PHONE = {**NARROW, "has_touch": True}


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

    def selected(self) -> str:
        return self.text("#bucket-title").split("\n")[0]

    def stages(self) -> dict[str, tuple[str, str]]:
        """The time of each stage of the selected bucket, and the note on it."""
        rows = "all => all.map(row => [...row.children].map(cell => cell.innerText))"
        found = self.page.eval_on_selector_all("#bucket-stages tr", rows)
        return {name: (took, note) for name, took, note in found}

    def texts(self, selector: str) -> list[str]:
        """Also of what is out of view."""
        return [text.replace("\xa0", " ").strip() for text in self.page.locator(selector).all_text_contents()]

    def axis(self) -> list[float]:
        """The times that are in view at the marks of the axis, from left to right."""
        area = self.page.locator("#timeline").bounding_box()
        places = [left for left, _ in self.bars("#timeline .mark")]
        texts = zip(places, self.texts("#timeline .mark"), strict=True)
        return [
            float(text.split()[0]) for left, text in texts if text and 0 <= left - area["x"] < area["width"] - 1
        ]

    def time_at(self, x: float) -> float:
        """The milliseconds at a place on the page, by the first two marks of the axis, in view or not."""
        (zero, _), (first, _), *_ = self.bars("#timeline .mark")
        return (x - zero) / (first - zero) * float(self.texts("#timeline .mark")[1].split()[0])

    def box(self, selector: str, place: int = 0) -> dict[str, float]:
        box = self.page.locator(selector).nth(place).bounding_box()
        assert box is not None, f"{selector} is not to be seen"
        return box

    def bars(self, selector: str) -> list[tuple[float, float]]:
        """From where to where they reach on the page, from left to right."""
        return self.page.eval_on_selector_all(
            selector,
            "all => all.map(n => n.getBoundingClientRect()).map(b => [b.left, b.right]).sort(([a], [b]) => a - b)",
        )

    def scrolled(self) -> float:
        return self.page.eval_on_selector("#timeline", "node => node.scrollLeft")

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
    name, context = getattr(request, "param", ("made", {}))
    page = Seen(browser, render([Analysis(one) for one in SHOWN[name]]), tmp_path, **context)
    yield page
    page.photograph(re.sub(r"\W+", "-", request.node.name))
    page.close()


# ---------------------------------------------------------------------- what there is to see


def test_the_first_view_says_what_there_is_to_see(seen: Seen) -> None:
    assert seen.page.title() == "three buckets: minddp x-ray"
    waits = r"Rank 0 waits \S+ ms for rank 1, which spends 3.00 ms more in other work\."
    assert re.fullmatch(rf"Step: \S+ ms\. Exposed communication: \S+ ms\. {waits}", seen.text("h1"))
    assert seen.page.locator("#timeline .bucket").count() == 2 * 3
    assert "Where it is red, the rank has no work left and is blocked" in seen.text("#how")
    drawn = seen.texts("#timeline .label, #timeline .fitted")
    assert {"rank 0", "rank 1", "forward", "backward", "blocked in communication"} <= set(drawn)
    assert "Recorded on ranks 0 and 1 (somewhere)." in seen.text("#facts")
    assert re.search(r"waiting for a slower rank\s+3.00 ms\s+0.00 ms", seen.text("#parts-tables"))


def test_it_begins_with_the_bucket_that_costs_most(seen: Seen) -> None:
    assert seen.selected() == "Bucket 2, rank 1", "of the rank that ends backward last"
    assert "blocks." in seen.text("#bucket-stages")


def test_what_is_red_is_what_a_rank_is_blocked_by(seen: Seen) -> None:
    """The wires of made-up ranks are never idle while one waits: two rows, the same red."""
    red, still = seen.bars("#timeline .moves-exposed"), seen.bars("#timeline .blocked")
    assert len(red) == len(still) == 2 * 2
    for (left, right), (begin, end) in zip(red, still, strict=True):
        assert left == pytest.approx(begin, abs=2)
        assert right == pytest.approx(end, abs=2)
    color = "backgroundColor"
    assert seen.style("#timeline .moves-exposed", color) != seen.style("#timeline .moves", color)


def test_while_backward_runs_a_bucket_waits_for_ranks_without_cost(seen: Seen) -> None:
    """Rank 1 is 3 ms late."""
    (left, right), _ = seen.bars("#timeline .waits")
    whole = seen.bars("#timeline .backward")[0]
    assert (right - left) / (whole[1] - whole[0]) == pytest.approx(3 / 20, abs=0.01)
    assert seen.page.locator("#timeline .waits-exposed").count() == 0


@shown("sixty buckets")
def test_buckets_that_hardly_last_can_be_seen_and_clicked(seen: Seen) -> None:
    assert seen.page.locator("#timeline .bucket").count() == 2 * 60
    assert min(right - left for left, right in seen.bars("#timeline .bucket")) >= 2.4
    seen.page.locator("#timeline .bucket[data-bucket='30']").first.click()
    assert seen.selected().startswith("Bucket 30, rank 0")


@pytest.mark.parametrize("seen", [("made", {}), ("both", NARROW), ("long names", NARROW)], indirect=True, ids=str)
def test_no_text_of_a_chart_is_cut_off_or_lies_on_another(seen: Seen) -> None:
    """Words that have no room are below their box, where they are not drawn."""
    words = """all => all.flatMap(node => [...node.childNodes].flatMap(child => {
        const box = node.closest("#timeline div:not(.chart)").getBoundingClientRect();
        const range = document.createRange();
        range.selectNodeContents(child);
        return [...range.getClientRects()].filter(at => at.width && at.top < box.bottom - 1)
            .map(at => [child.textContent, at.left, at.top, at.right, at.bottom, box.left, box.right]);
    }))"""
    texts = seen.page.eval_on_selector_all("#timeline .mark, #timeline .label, #timeline .fitted", words)
    assert len(texts) > 8
    for text, left, _, right, _, least, most in texts:
        assert least - 0.5 <= left <= right <= most + 0.5, text
    for one, *a, _, _ in texts:
        for other, *b, _, _ in texts:
            apart = a[2] <= b[0] + 1 or b[2] <= a[0] + 1 or a[3] <= b[1] + 4 or b[3] <= a[1] + 4
            assert apart or a == b, (one, other)


@shown("cut short")
def test_a_step_that_an_error_ended_is_shown_with_the_error(seen: Seen) -> None:
    assert seen.text("h1").startswith("This step is incomplete")
    assert "Rank 0 ended with ValueError: no." in seen.text("#sentences")
    assert seen.stages()["waits for ranks"][1] == "it never arrived"
    assert not seen.page.is_visible("#what-ifs")


@shown("evil")
def test_names_are_shown_as_they_are(seen: Seen) -> None:
    assert seen.page.title() == "<i>&{{DATA}}: minddp x-ray"
    assert "</script>{{JS}}<b>&\"'" in seen.text("#bucket-stages")


# ---------------------------------------------------------------------- a bucket


def test_a_click_on_a_bucket_shows_its_history(seen: Seen) -> None:
    seen.page.locator("#timeline .bucket[data-bucket='1']").first.click()
    assert seen.selected().startswith("Bucket 1, rank 0")
    assert "3 gradients" in seen.text("#bucket-facts")
    assert "on the wire" in seen.stages()
    assert seen.page.locator("#timeline .bucket.on").count() == 2, "the same bucket is marked on both ranks"


def test_the_stages_of_a_bucket(seen: Seen) -> None:
    """Computed by hand: each message takes 8.5 ms, and bucket 1 leaves rank 1 at 14 + 5/6 of 20 ms.

    Before that bucket 0 is in its way, which left rank 1 at 14 + 2/6 of 20 ms.
    """
    seen.page.locator("#timeline .bucket[data-bucket='1']").first.click()
    stages = seen.stages()
    assert stages["fills"][1] == "its last gradient is blocks.4.weight"
    assert stages["queues"] == ("1.50 ms", "one bucket travels at a time")
    assert stages["waits for ranks"] == ("1.50 ms", "rank 1 launches it last")
    assert stages["on the wire"][1].endswith("; 7.67 ms of it exposed")
    assert "It blocks rank 0 for 7.67 ms." in seen.text("#bucket-facts")
    seen.press("ArrowRight")
    stages = seen.stages()
    assert stages["queues"][0] == "8.17 ms"
    assert stages["on the wire"][1].endswith("; 8.00 ms of it exposed")
    seen.press("ArrowDown")
    assert seen.stages()["waits for ranks"][0] == "0.00 ms"


def test_the_tick_of_the_last_gradient_stands_where_its_time_is(seen: Seen) -> None:
    """Bucket 0's last gradient of rank 0: a third through backward."""
    seen.page.locator("#timeline .bucket[data-bucket='0']").first.click()
    backward, ticks = seen.bars("#timeline .backward")[0], seen.bars("#timeline .tick.on")[0]
    share = (ticks[1] - backward[0]) / (backward[1] - backward[0] + 1)
    assert share == pytest.approx(1 / 3, abs=0.01)


# ---------------------------------------------------------------------- mouse, keys, fingers


def test_what_lies_under_the_mouse_is_named(seen: Seen) -> None:
    titles = seen.page.eval_on_selector_all("#timeline [title]", "all => all.map(node => node.title)")
    texts = [text.split("\n") for text in titles]
    assert ["backward, rank 0", "20.0 ms, from 11.0 ms on"] in texts
    (bucket,) = [text for text in texts if text[0] == "bucket 1, rank 0"]
    assert bucket[1] == "3 gradients, 2 MiB"
    assert bucket[-1] == "on the wire 8.50 ms"


def test_arrow_keys_go_from_bucket_to_bucket_and_rank_to_rank(seen: Seen) -> None:
    seen.press("ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowLeft")
    assert seen.selected().startswith("Bucket 0, rank 0")
    seen.press("ArrowRight", "ArrowDown")
    assert seen.selected().startswith("Bucket 1, rank 1")
    seen.press("ArrowUp", "ArrowUp")
    assert seen.selected().startswith("Bucket 1, rank 0")


def test_keys_zoom_move_and_fit(seen: Seen) -> None:
    whole = seen.axis()
    seen.press("w", "w")
    zoomed = seen.axis()
    assert zoomed[0] > whole[0]
    assert zoomed[-1] < whole[-1]
    assert len(zoomed) > 2
    seen.press("a")
    assert seen.axis()[0] < zoomed[0]
    seen.press("d")
    assert seen.axis() == zoomed
    seen.press("0")
    assert seen.axis() == whole
    seen.press("s")
    assert seen.axis() == whole, "there is nothing outside the step to be seen"


def test_a_bucket_outside_the_view_is_brought_into_it(seen: Seen) -> None:
    seen.press(*"wwww", "ArrowLeft", "ArrowLeft")
    area, outline = seen.box("#timeline"), seen.box("#timeline .bucket.on")
    assert seen.selected().startswith("Bucket 0")
    assert outline["x"] < area["x"] + area["width"]
    assert outline["x"] + outline["width"] > area["x"]


@shown("fifty steps")
def test_all_can_be_reached_by_the_tab_key(seen: Seen) -> None:
    reached = []
    for _ in range(20):
        seen.page.keyboard.press("Tab")
        reached.append(seen.page.evaluate("document.activeElement.id || document.activeElement.name"))
    assert reached.index("timeline") < 8, "fifty steps are not fifty stops on the way"
    assert {"step-after", "zoom-in", "zoom-out", "zoom-fit"} <= set(reached)


def test_the_focus_can_be_seen(seen: Seen) -> None:
    seen.press("ArrowLeft")
    assert seen.style("#timeline", "outlineStyle") == "solid"


def test_the_wheel_zooms_where_the_mouse_is(seen: Seen) -> None:
    box = seen.box("#timeline")
    mouse = box["x"] + 0.6 * box["width"]
    seen.page.mouse.move(mouse, box["y"] + 60)
    before = seen.time_at(mouse)
    seen.page.keyboard.down("Control")
    seen.page.mouse.wheel(0, -240)
    seen.page.keyboard.up("Control")
    seen.page.wait_for_function("() => document.querySelector('#timeline').scrollLeft > 0")
    assert seen.time_at(mouse) == pytest.approx(before, rel=1e-2), "what was under the mouse still is"
    zoomed, scrolled = seen.axis(), seen.scrolled()
    seen.page.mouse.wheel(300, 0)
    seen.page.wait_for_function(f"() => document.querySelector('#timeline').scrollLeft > {scrolled + 100}")
    assert seen.axis()[0] > zoomed[0]
    assert seen.page.evaluate("scrollY") == 0


def test_a_plain_wheel_scrolls_the_page(seen: Seen) -> None:
    whole = seen.axis()
    box = seen.box("#timeline")
    seen.page.mouse.move(box["x"] + 300, box["y"] + 60)
    seen.page.mouse.wheel(0, 300)
    seen.page.wait_for_function("() => scrollY > 100")
    assert seen.axis() == whole


@shown("made", **PHONE)
def test_a_tap_selects(seen: Seen) -> None:
    seen.page.locator("#timeline .bucket[data-bucket='0']").first.tap()
    assert seen.selected().startswith("Bucket 0, rank 0")


# ---------------------------------------------------------------------- steps, changes, recordings


def test_other_steps_can_be_seen(seen: Seen) -> None:
    assert seen.page.locator("#strip button").count() == 3
    assert seen.text("#step-label") == "Step 0, the median of 3"
    assert seen.page.is_disabled("#step-before")
    seen.press("n")
    assert seen.text("#step-label").startswith("Step 1, ")
    assert seen.page.locator("#strip button[aria-pressed=true]").count() == 1
    seen.press("p")
    seen.page.click("#step-after")
    seen.page.click("#step-after")
    assert seen.page.is_disabled("#step-after")
    seen.page.locator("#strip button").nth(1).click()
    assert seen.text("#step-label").startswith("Step 1, ")


def test_advice_is_listed_below_the_headline_and_other_changes_on_demand(seen: Seen) -> None:
    advice = seen.texts("#advice li")
    assert advice[0].startswith("A wire 10 times as fast: ")
    assert not seen.page.is_visible("#what-if-list")
    seen.page.click("#what-ifs summary")
    changes = seen.texts("#what-if-list li")
    assert len(advice) + len(changes) > 8
    assert any("bucket_cap_mb=6" in change for change in changes)
    assert not seen.page.locator("#what-ifs .warning").count(), "an ideal wire is predicted well"


@shown("misjudged")
def test_a_model_that_is_far_off_says_so(seen: Seen) -> None:
    seen.page.click("#what-ifs summary")
    assert "Do not rely on these predictions" in seen.text("#what-ifs .warning")


@shown("both")
def test_recordings_side_by_side(seen: Seen) -> None:
    assert re.findall(r"(\w+ buckets?)\trank 0", seen.text("#parts-tables")) == ["three buckets", "one bucket"]
    assert "51.2 ms" in seen.text("#parts-tables")
    assert seen.page.locator("#timeline .bucket").count() == 6 + 2
    assert not seen.page.is_visible("#what-ifs")
    assert not seen.page.is_visible("#step-keys")
    seen.press(*["ArrowDown"] * 3)
    assert seen.selected().startswith("Bucket 0, one bucket, rank 1")


@shown("both")
def test_recordings_are_drawn_on_one_scale(seen: Seen) -> None:
    """All ranks compute backward for 20 ms."""
    lengths = {round(right - left) for left, right in seen.bars("#timeline .backward")}
    assert len(lengths) == 1
    ends = seen.bars("#timeline .optimizer")
    assert len(ends) == 4, "also that of the longer one is in view"


def test_all_of_many_ranks_are_drawn(browser: Any, tmp_path: Path) -> None:
    many = Analysis(recording([Rank()] * 12, PLAN))
    seen = Seen(browser, render([many]), tmp_path)
    assert seen.page.locator("#timeline .bucket").count() == 12 * 3
    seen.press(*["ArrowDown"] * 11)
    assert seen.selected().startswith("Bucket 2, rank 11")
    seen.close()


# ---------------------------------------------------------------------- narrow, light, dark


@pytest.mark.parametrize(
    "seen",
    [*((name, NARROW) for name in SHOWN), ("fifty steps", PHONE)],
    indirect=True,
    ids=[*SHOWN, "fifty steps, phone"],
)
def test_a_narrow_window_needs_no_sideways_scrolling(seen: Seen) -> None:
    assert seen.page.evaluate("document.documentElement.scrollWidth") == 380
    cut_off = "all => all.filter(node => node.scrollWidth > node.clientWidth + 1).map(node => node.innerText)"
    assert seen.page.eval_on_selector_all("h1, p, li, .scroll, button, .bar", cut_off) == []


@shown("made", **NARROW)
def test_a_window_that_changes_is_drawn_anew(seen: Seen) -> None:
    seen.page.set_viewport_size({"width": 1000, "height": 700})
    seen.page.wait_for_function("() => document.querySelector('#timeline .chart').clientWidth > 800")
    assert len(seen.axis()) > 5


@pytest.mark.parametrize("seen", [("made", {"color_scheme": c}) for c in ("light", "dark")], indirect=True, ids=str)
def test_text_can_be_read_in_light_and_dark(seen: Seen) -> None:
    """WCAG 2: text 4.5, shapes 3 against what lies behind them."""
    colors = seen.page.evaluate(
        """names => Object.fromEntries(names.map(name => {
            document.body.style.color = `var(--${name})`;
            return [name, getComputedStyle(document.body).color];
        }))""",
        ["page", "card", "ink", "soft", "exposed-pale", "tick", *FILLS, *(f"on-{name}" for name in FILLS)],
    )
    texts = [("ink", "page"), ("ink", "card"), ("soft", "page"), ("soft", "card"), ("ink", "exposed-pale")]
    texts += [("exposed", "card"), ("exposed", "exposed-pale"), ("wire", "card")]
    texts += [(f"on-{name}", name) for name in FILLS]
    for front, back in texts:
        assert contrast(colors[front], colors[back]) >= 4.5, (front, back)
    for shape in ("forward", "backward", "wire", "exposed", "optimizer", "tick"):
        assert contrast(colors[shape], colors["card"]) >= 3, shape


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@shown("made", color_scheme="dark")
def test_the_theme_is_the_systems(seen: Seen) -> None:
    dark = seen.style("body", "backgroundColor")
    seen.page.emulate_media(color_scheme="light")
    light = seen.style("body", "backgroundColor")
    assert sum(map(int, re.findall(r"\d+", light)[:3])) > 600 > 200 > sum(map(int, re.findall(r"\d+", dark)[:3]))
