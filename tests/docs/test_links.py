"""The README and all pages of docs/: links lead to what their texts name, cited notes exist once."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.learning.quotes import FOLDER, ROOT
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


# ------------------------------------------------------------------ the check itself

PAGE = "# A heading, of `two` parts\n"


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ("[`Bucket.pack`](../../minddp/core/bucket.py)", None),
        (
            "[`Bucket.unheard_of`](../../minddp/core/bucket.py)",
            "../../minddp/core/bucket.py does not define Bucket.unheard_of",
        ),
        ("[`LARGE_BYTES`](../../minddp/core/packing.py)", None),
        ("[`bucket.py`](../../minddp/core/bucket.py)", None),
        ("[`barrel.py`](../../minddp/core/bucket.py)", "../../minddp/core/bucket.py is not barrel.py"),
        ("[`core/`](../../minddp/core/__init__.py)", None),
        ("[`minddp/core/`](../../minddp/core)", None),
        ("[`crate/`](../../minddp/core)", "../../minddp/core is not crate/"),
        ("[gone](../../minddp/gone.py)", "../../minddp/gone.py does not exist"),
        ("[`[Note: launch order]`](../../minddp/core/plan.py)", None),
        (
            "[`[Note: lunch order]`](../../minddp/core/plan.py)",
            "../../minddp/core/plan.py has no [Note: lunch order]",
        ),
        ("[a heading](#a-heading-of-two-parts)", None),
        ("[no heading](#another)", " has no heading #another"),
        ("[torch](https://pytorch.org)", None),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, link: str, fault: str | None) -> None:
    page = FOLDER / "README.md" if "../" in link else tmp_path / "page.md"
    if page.parent == tmp_path:
        page.write_text(PAGE)
    [found] = links(link)
    assert fault_of(found, page) == fault


def test_notes_are_found_where_they_are_cited_and_where_they_stand() -> None:
    assert notes_cited("see [Note: launch order](plan.py) and `[Note: no such]`, as every [Note: x]") == {
        "[Note: launch order]",
        "[Note: no such]",
    }
    assert how_often_it_exists("[Note: launch order]") == 1
    assert how_often_it_exists("[Note: the explicit call]") == 1  # of reference/
    assert how_often_it_exists("[Note: no such]") == 0
