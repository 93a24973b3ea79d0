"""The README and all pages of docs/: links lead to what their texts name, cited notes exist once."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.learning.quotes import ROOT
from tests.docs.links import fault_of, how_often_it_exists, links, notes_cited, pictures

PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_where_they_say(page: Path) -> None:
    assert [fault for link in links(page.read_text()) if (fault := fault_of(link, page))] == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_pictures_exist(page: Path) -> None:
    assert [picture for picture in pictures(page.read_text()) if not (page.parent / picture).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_each_note_that_is_cited_exists_once(page: Path) -> None:
    found = {note: how_often_it_exists(note) for note in notes_cited(page.read_text())}
    assert {note: count for note, count in found.items() if count != 1} == {}
