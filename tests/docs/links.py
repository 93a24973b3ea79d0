"""Links of a page, and the reasons why one of them does not lead where it says."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from docs.definitions import definitions
from docs.learning.quotes import ROOT

_LINK = re.compile(r"(?<!!)\[(?P<text>`[^`]+`|[^\]]+)\]\((?P<target>[^)#\s]*)(?:#(?P<anchor>[^)]+))?\)")
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")
_NOTE = re.compile(r"\[Note: [^\]]+\]")


class Link(NamedTuple):
    """`text` as it is shown, with its backticks; `target` relative to the page, empty within the page."""

    text: str
    target: str
    anchor: str


def links(text: str) -> list[Link]:
    return [Link(m["text"], m["target"], m["anchor"] or "") for m in _LINK.finditer(text)]


def pictures(text: str) -> list[str]:
    return _PICTURE.findall(text)


def fault_of(link: Link, page: Path) -> str | None:
    """Why a link does not lead where it says; `None` if it does, or leads out of the repository.

    A text in backticks is a name: of the file, of its folder, of something that it defines, or of a note in it.
    """
    if link.target.startswith(("http:", "https:")):
        return None
    target = (page.parent / link.target).resolve() if link.target else page
    if not target.exists():
        return f"{link.target} does not exist"
    if link.anchor and link.anchor not in anchors(target.read_text()):
        return f"{link.target} has no heading #{link.anchor}"
    name = link.text.strip("`")
    if name in (link.text, target.stem) or not link.target:
        return None
    if "/" in name or re.fullmatch(r"[\w.-]+\.(py|md|json)", name):
        is_there = any(str(place).endswith(f"/{name.rstrip('/')}") for place in _names_of(target))
        return None if is_there else f"{link.target} is not {name}"
    if target.suffix != ".py":
        return None
    text = target.read_text()
    if name.startswith("[Note: "):
        return None if name in notes_in(text) else f"{link.target} has no {name}"
    return None if name.removesuffix("()") in definitions(text) else f"{link.target} does not define {name}"


def _names_of(target: Path) -> list[Path]:
    """The file or folder itself, and the folder whose `__init__.py` it is."""
    return [target, *([target.parent] if target.name == "__init__.py" else [])]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ------------------------------------------------------------------ notes


def notes_in(source: str) -> list[str]:
    """The titles of the notes that a module contains: a title has a line of its own."""
    return [line.strip() for line in source.splitlines() if _NOTE.fullmatch(line.strip())]


def notes_cited(text: str) -> set[str]:
    """The titles that a page cites, except `[Note: x]`, which stands for any."""
    return set(_NOTE.findall(text)) - {"[Note: x]"}


@cache
def notes_of(package: str) -> list[str]:
    """The titles of all notes in a package, each as often as it is there."""
    return [note for path in sorted((ROOT / package).rglob("*.py")) for note in notes_in(path.read_text())]


def how_often_it_exists(note: str) -> int:
    """The number of notes with this title in `minddp/`; if there is none, in `reference/`."""
    return notes_of("minddp").count(note) or notes_of("reference").count(note)
