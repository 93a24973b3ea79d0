"""`python -m docs.torch_map NAME ...`: what answers here to a name of torch's DDP, or there to one of minddp.

    python -m docs.torch_map mark_variable_ready
    python -m docs.torch_map BackwardPass.mark_ready
    python -m docs.torch_map --fill                    renew the tables of docs/torch_map.md

`torch_map.yaml` is the map. Everything here reads it; the page quotes what `section`, `versions` and `core` print.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from cogapp import Cog

from docs.definitions import definitions

FOLDER = Path(__file__).parent
PACKAGE = FOLDER.parent / "minddp"
PAGE = FOLDER / "torch_map.md"
BASE = "2.13"  # members without `since` are in this version of torch, and in later ones


@dataclass(frozen=True)
class Place:
    """A function, class or attribute of minddp: `file` is relative to the package, `name` dotted."""

    file: str
    name: str

    def __str__(self) -> str:
        return f"minddp/{self.file}::{self.name}"

    @property
    def names(self) -> tuple[str, str, str]:
        """What a question may call it."""
        return self.name, self.name.rpartition(".")[2], str(self)

    @property
    def link(self) -> str:
        """To the file, under the name; an attribute stands behind its class."""
        outer, _, last = self.name.rpartition(".")
        is_attribute = self.name not in defined_in(self.file) and outer in defined_in(self.file)
        name, rest = (outer, f"`.{last}`") if is_attribute else (self.name, "")
        return f"[`{name}`](../minddp/{self.file}){rest}"


@dataclass(frozen=True)
class Row:
    """Members of torch's class `of` that have the same counterpart: functions end with `()`."""

    of: str
    when: str
    names: tuple[str, ...]
    here: tuple[Place, ...]
    note: str
    since: str

    def answers_to(self, query: str) -> bool:
        """True for `name`, `name()`, `Class::name`, `Class.name`, and for functions of minddp."""
        theirs = [name.removesuffix("()") for name in self.names]
        theirs += [f"{self.of}{between}{name}" for name in theirs for between in ("::", ".")]
        return query.removesuffix("()") in theirs or any(query in place.names for place in self.here)


# ------------------------------------------------------------------ the map


@cache
def _data() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "torch_map.yaml").read_text())


@cache
def rows() -> tuple[Row, ...]:
    return tuple(
        Row(section["of"], when, tuple(names.split(", ")), _places(row), row.get("note", ""), row.get("since", ""))
        for section in _data()["sections"]
        for when, members in section["when"].items()
        for names, row in members.items()
    )


def _places(row: dict[str, Any]) -> tuple[Place, ...]:
    return tuple(Place(*place.split("::")) for place in row.get("here", "").split())


def sections() -> list[str]:
    return [section["of"] for section in _data()["sections"]]


def elsewhere() -> set[str]:
    """Classes in torch's headers that are no part of DDP."""
    return {name for names in _data()["elsewhere"] for name in names.split(", ")}


def ours() -> dict[Place, str]:
    """The functions of core/ that have no counterpart in torch, and why."""
    return {
        Place(f"core/{file}", name): why
        for file, groups in _data()["ours"].items()
        for why, names in groups.items()
        for name in names.split()
    }


def members(version: str) -> dict[str, set[str]]:
    """What the map says that a version of torch has, by class."""
    found: dict[str, set[str]] = {of: set() for of in sections()}
    for row in rows():
        if _number(row.since or BASE) <= _number(version):
            found[row.of].update(row.names)
    return found


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


# ------------------------------------------------------------------ minddp


@cache
def defined_in(file: str) -> dict[str, ast.stmt]:
    """What a file of minddp defines, by dotted name."""
    return definitions((PACKAGE / file).read_text())


@cache
def functions_of_core() -> tuple[Place, ...]:
    return tuple(
        Place(file, name)
        for file in sorted(f"core/{path.name}" for path in (PACKAGE / "core").glob("*.py"))
        for name, node in defined_in(file).items()
        if isinstance(node, ast.FunctionDef)
    )


def exists(place: Place) -> bool:
    """True if the file defines the name, or if the class before the last dot assigns such an attribute."""
    if not (PACKAGE / place.file).is_file():
        return False
    owner, _, last = place.name.rpartition(".")
    parts = ast.walk(defined_in(place.file).get(owner, ast.Pass()))
    return place.name in defined_in(place.file) or any(
        isinstance(part, ast.Attribute) and part.attr == last and isinstance(part.ctx, ast.Store) for part in parts
    )


# ------------------------------------------------------------------ called by the page


def section(of: str) -> None:
    """All members of one class, by when they matter."""
    entry = next(entry for entry in _data()["sections"] if entry["of"] == of)
    print(f"From `{entry['file']}`.{' ' + entry['about'] if 'about' in entry else ''}")
    for when in entry["when"]:
        print(f"\n**{when}**\n\n| torch | minddp | what differs |\n|---|---|---|")
        for row in rows():
            if (row.of, row.when) == (of, when):
                since = f"Since torch {row.since}. " if row.since else ""
                here = "<br>".join(place.link for place in row.here) or "–"
                print(f"| {_listed(row.names, '<br>')} | {here} | {since}{_linked(row.note)} |")


def step(*names: str) -> None:
    """The way of a gradient through torch's reducer, in a few rows."""
    print("| | torch | minddp |\n|---|---|---|")
    for name in names:
        [row] = [row for row in rows() if row.of == "Reducer" and name in row.names]
        print(f"| {row.when} | `{name}` | {', '.join(place.link for place in row.here[:2])} |")


def versions() -> None:
    """What later versions of torch have brought."""
    print("| torch | of | since | minddp |\n|---|---|---|---|")
    for row in filter(lambda row: row.since, rows()):
        links = ", ".join(place.link for place in row.here)
        print(f"| {_listed(row.names)} | `{row.of}` | {row.since} | {links or row.note} |")


def core(file: str) -> None:
    """The functions of one file of core/, with what answers to each in torch."""
    print("| minddp | torch |\n|---|---|")
    for place in functions_of_core():
        if place.file == f"core/{file}" and place not in ours():
            print(f"| {place.link} | {_listed(counterparts(place))} |")
    for why, names in _data()["ours"].get(file, {}).items():
        print(f"| {', '.join(Place(f'core/{file}', name).link for name in names.split())} | – {why} |")


def counterparts(place: Place) -> list[str]:
    """What torch has in place of a function, as `Class::name()`."""
    return [f"{row.of}::{name}" for row in rows() if place in row.here for name in row.names]


def _listed(names: Iterable[str], between: str = ", ") -> str:
    return between.join(f"`{name}`" for name in names)


def _linked(note: str) -> str:
    """With links to the titled notes that it cites."""
    return re.sub(r"\[Note: [^\]]+\]", lambda cited: f"[`{cited[0]}`](../{_file_of(cited[0])})", note)


@cache
def _file_of(title: str) -> str:
    files = sorted(PACKAGE.rglob("*.py"))
    [file] = [file for file in files if title in map(str.strip, file.read_text().splitlines())]
    return str(file.relative_to(PACKAGE.parent))


# ------------------------------------------------------------------ the command


def shown(row: Row) -> str:
    """A row as the command prints it."""
    head = f"{row.of}: {', '.join(row.names)}" + (f"   (from torch {row.since})" if row.since else "")
    here = [f"    {place}" for place in row.here] or ["    no counterpart"]
    note = textwrap.fill(row.note, 100, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([head, f"    {row.when}", *here, *([note] if note else [])])


def main(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--fill"]:
        return Cog().main(["cog", "-r", "-P", "--verbosity=1", str(PAGE)])
    if not arguments:
        print(__doc__)
    for query in arguments:
        found = [shown(row) for row in rows() if row.answers_to(query)]
        found += [f"{place}\n    ours alone: {why}" for place, why in ours().items() if query in place.names]
        if not found:
            raise SystemExit(f"The map has no `{query}`. docs/torch_map.md shows all of it.")
        print("\n\n".join(found), end="\n\n" if query is not arguments[-1] else "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
