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
def test_links_lead_where_they_say_pictures_exist_and_cited_notes_exist_once(page: Path) -> None:
    text = page.read_text()
    assert [fault for link in links(text) if (fault := fault_of(link, page))] == []
    assert [picture for picture in pictures(text) if not (page.parent / picture).exists()] == []
    assert [note for note in notes_cited(text) if how_often_it_exists(note) != 1] == []
