"""The site of `make docs`: it builds without a warning, every link leads somewhere, and it needs no network."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from docs.site import recording
from docs.site.recording import ROOT
from tests.processes import python

pytest.importorskip("material", reason="needs what `make docs` installs")
from docs.site import annotated

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    python("-m", "mkdocs", "build", "--quiet", "-f", "docs/site/mkdocs.yml", "-d", str(folder))
    return folder


# ------------------------------------------------------------------ links


class Linked(HTMLParser):
    """What a page links, what it needs to be shown, and the anchors that it has."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.needed: list[str] = []
        self.anchors = {"", "__top"}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values.get("id", ""), values.get("name", "")}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("img", "script", "iframe") and "src" in values:
            self.needed.append(values["src"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload"):
            self.needed.append(values["href"])


@cache
def read(path: Path) -> Linked:
    return Linked(path)


def faults_of(page: Path) -> Iterator[str]:
    """Links of a page that lead nowhere, and what it would take from a network."""
    for url in read(page).needed:
        if urlsplit(url).scheme not in ("", "data") or not (page.parent / urlsplit(url).path).is_file():
            yield f"{page.name} needs {url}"
    for url in read(page).links:
        parts = urlsplit(url)
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        if parts.scheme or parts.netloc:
            continue
        if not target.is_file():
            yield f"{page.name} links {url}, which is no file"
        elif target.suffix == ".html" and unquote(parts.fragment) not in read(target).anchors:
            yield f"{page.name} links {url}, but there is no such anchor"


@pytest.mark.slow
def test_every_link_leads_somewhere_and_nothing_needs_a_network(site: Path) -> None:
    pages = [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]
    assert len(pages) > 100
    assert [fault for page in pages for fault in faults_of(page)] == []
    loaded = [path for path in site.rglob("*.css") if re.search(r"url\(['\"]?(https?:)?//", path.read_text())]
    assert loaded == []


# ------------------------------------------------------------------ pages


@pytest.mark.slow
def test_each_file_of_the_core_has_a_page_with_all_its_code(site: Path) -> None:
    for file in annotated.files(*annotated.FOLDERS):
        page = (site / f"{file}.html").read_text()
        assert page.count('class="at"') == len((ROOT / file).read_text().splitlines()), file


def test_a_function_has_beside_it_its_notes_its_counterpart_and_what_it_did() -> None:
    [beside] = re.findall(r'id="BackwardPass\.mark_ready".*?<aside>(.*?)</aside>', _page_of_a_pass(), re.DOTALL)
    assert '<a href="#note-the-hook-is-bound">[Note: the hook is bound]</a>' in beside
    assert "<code>Reducer::mark_variable_ready()</code>" in beside
    assert "<code>BackwardPass.mark_ready</code> 10× and 10×" in beside


def test_a_note_links_the_places_that_cite_it() -> None:
    [beside] = re.findall(r"<b>\[Note: the hook is bound\]</b> is cited by (.*?)</p>", _page_of_a_pass())
    assert '<a href="#BackwardPass.mark_ready">' in beside
    assert '<a href="reducer.py.html#Reducer._bind_hooks">' in beside


def _page_of_a_pass() -> str:
    return annotated.page("minddp/core/backward_pass.py")


def test_the_parts_of_a_file_are_all_of_it() -> None:
    for file in annotated.files(*annotated.FOLDERS):
        lines = [line for part in annotated.parts_of(file) for line in part.lines]
        assert lines == (ROOT / file).read_text().splitlines()


# ------------------------------------------------------------------ the recording


def test_each_recorded_function_exists() -> None:
    for rows in recording.kept().values():
        for called in rows:
            file, _, name = called.function.partition("::")
            assert annotated.outermost(file, name), called.function


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name")
@pytest.mark.parametrize("run", ["shared_memory", "bucketed", "zero2"])
def test_the_recording_is_still_true(run: str) -> None:
    """Polling is left out: how often depends on the clock."""

    def steady(rows: list[recording.Called]) -> list[tuple[str, list[int], str]]:
        counted = [row for row in rows if row.function.startswith(("minddp/core/", "reference/"))]
        return [(row.function, row.calls, row.during) for row in counted]

    assert steady(recording.record(run)) == steady(recording.kept()[run]), "run python -m docs.site.recording"


def test_the_hour_quotes_the_recording() -> None:
    calls = {row.function.rpartition("::")[2]: row.calls for row in recording.kept()["shared_memory"]}
    asked = ("GradientHooks._fire", "BackwardPass.mark_ready", "Reducer._on_hook", "BackwardPass._pack_group")
    assert [calls[name] for name in asked] == [[10, 10], [10, 10], [1, 1], [8, 8]]


# ------------------------------------------------------------------ in a browser


def missing(request: Any) -> list[str]:
    """The URL of a file that is not there. A request that the next page has cut off is no fault."""
    return [] if request.failure == "net::ERR_ABORTED" else [request.url]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: make chromium")
def test_it_opens_from_disk_without_complaints_at_a_desk_and_on_a_phone(site: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    complaints: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for scheme, width in (("light", 1280), ("dark", 390)):
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
            )
            page = context.new_page()
            page.set_default_timeout(120_000)  # ms; it may share its cores with other tests
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("requestfailed", lambda request: complaints.extend(missing(request)))
            for path in ("index.html", "minddp/core/reducer.py.html", "docs/api.html", "docs/hour.html"):
                page.goto((site / path).as_uri())
                assert page.evaluate("document.documentElement.scrollWidth") <= width, path
                assert page.evaluate("document.body.dataset.mdColorScheme") == {"light": "default"}.get(
                    scheme, "slate"
                )
        _search(page, "launch order")
        browser.close()
    assert complaints == []


def _search(page: Any, words: str) -> None:
    """As on a phone: the field opens with a button. All at once: the page complains of some single letters."""
    page.click("label[for=__search]")
    page.locator(".md-search__input").fill(words)
    page.locator(".md-search__input").press("End")
    page.locator(".md-search-result__link").first.wait_for(timeout=60_000)
    assert "Launching in the order" in page.inner_text(".md-search-result__list")
