"""Annotated source: code, and beside each function its notes, torch's counterpart and the recorded step."""

from __future__ import annotations

import ast
import html
import itertools
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from docs import torch_map
from docs.definitions import definitions
from docs.site import recording
from docs.site.recording import ROOT

NOTE = re.compile(r"\[Note: [^\]\n]+\]")
FOLDERS = ("minddp/core", "minddp/transport", "reference")  # in the navigation
STEP = "docs/recorded_step"  # the page of the whole step


class Part(NamedTuple):
    """Lines of a file, the first one with this index: a function, the head of a class, or what precedes them."""

    name: str
    first: int
    lines: list[str]


def files(*folders: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text()


@cache
def parts_of(file: str) -> list[Part]:
    """The file cut at each function, method and class; decorators and comments go with what follows them."""
    lines = text_of(file).splitlines()
    starts = {0: ""}
    for name, node in defined_in(file).items():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min(one.lineno for one in [node, *node.decorator_list]) - 1
            while lines[first - 1].lstrip().startswith("#"):
                first -= 1
            starts[first] = name
    order = [*sorted(starts), len(lines)]
    return [Part(starts[a], a, lines[a:b]) for a, b in itertools.pairwise(order)]


@cache
def defined_in(file: str) -> dict[str, ast.stmt]:
    return definitions(text_of(file))


@cache
def notes() -> dict[str, str]:
    """The file in which each note stands: its title has a line of its own."""
    lines = ((file, line.strip()) for file in files("reference", "minddp") for line in text_of(file).splitlines())
    return {line: file for file, line in lines if NOTE.fullmatch(line)}


@cache
def citations() -> dict[str, list[tuple[str, str]]]:
    """Where each note is cited: file and name of the part."""
    found: dict[str, list[tuple[str, str]]] = {}
    for file in files("minddp", "reference"):
        for part in parts_of(file):
            for note in cited_in(part):
                found.setdefault(note, []).append((file, part.name))
    return found


def cited_in(part: Part) -> list[str]:
    """The notes that a part cites and does not hold; a title may be broken over two lines."""
    text = re.sub(r"\s*\n\s*#?\s*", " ", "\n".join(line for line in part.lines if line.strip() not in notes()))
    return [note for note in dict.fromkeys(NOTE.findall(text)) if note in notes()]


# ------------------------------------------------------------------ pages


def page(file: str) -> str:
    """The page of a source file as HTML."""
    run = recording.run_for(file)
    step = f'<p>Calls are those of <a href="{to(STEP, file)}">one recorded step</a>, {run}.</p>' if run else ""
    lines, shown = highlighted(file), [f'<h1>{file}</h1>{step}<div class="source">']
    for part in parts_of(file):
        code = "".join(lines[part.first : part.first + len(part.lines)])
        margin = "".join(f"<p>{text}</p>" for text in beside(file, part, run))
        shown.append(f'<pre class="highlight"><code>{code}</code></pre><aside>{margin}</aside>')
    return "".join([*shown, "</div>"])


def highlighted(file: str) -> list[str]:
    """Each line as HTML, with anchors on what it defines and links on the notes that it cites."""
    names = {node.lineno: name for name, node in defined_in(file).items()}
    code = highlight(text_of(file), PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    lines = NOTE.sub(lambda found: with_links(html.unescape(found[0]), file), code).splitlines(keepends=True)
    for number, source in enumerate(map(str.strip, text_of(file).splitlines())):
        identity = id_of(source) if source in notes() else names.get(number + 1, f"L{number + 1}")
        lines[number] = f'<a class="at" id="{identity}" href="#{identity}">{number + 1:4} </a>{lines[number]}'
    return lines


def beside(file: str, part: Part, run: str | None) -> Iterator[str]:
    """What stands in the margin of one part."""
    for note in filter(notes().get, map(str.strip, part.lines)):
        places = ", ".join(link(cited, name, file) for cited, name in citations().get(note, []))
        yield f"<b>{html.escape(note)}</b> {f'is cited by {places}' if places else 'is cited by pages only'}."
    if cited := cited_in(part):
        yield f"See {', '.join(with_links(note, file) for note in cited)}."
    place = torch_map.Place(file.removeprefix("minddp/"), part.name)
    if theirs := torch_map.counterparts(place):
        code = ", ".join(f"<code>{html.escape(name)}</code>" for name in theirs)
        yield f'<a href="{to("docs/torch_map", file)}">torch</a>: {code}'
    yield from (with_links(row.note, file) for row in torch_map.rows() if place in row.here and row.note)
    if place in torch_map.ours():
        yield f"torch has none: {with_links(torch_map.ours()[place], file)}."
    for called in recording.kept()[run] if run else ():
        of_file, _, name = called.function.partition("::")
        if of_file == file and outermost(file, name) == part.name:
            times = " and ".join(f"{calls}×" for calls in called.calls)
            yield f'<span class="called"><code>{name}</code> {times}, no. {called.order}, {called.during}</span>'


def whole_step() -> str:
    """All recorded steps, each a table of first calls in order."""
    shown = [f"<p>{with_links(recording.__doc__ or '', STEP)}</p>"]
    for run, rows in recording.kept().items():
        shown.append(f"<details><summary>{run}: {len(rows)} functions, calls on rank 0 and rank 1</summary><table>")
        for called in rows:
            file, _, name = called.function.partition("::")
            cells = (called.order, called.during, link(file, name, STEP), file, *called.calls)
            shown.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
        shown.append("</table></details>")
    return "".join(shown)


# ------------------------------------------------------------------ links


def id_of(note: str) -> str:
    return re.sub(r"\W+", "-", note.lower()).strip("-")


def to(page: str, origin: str) -> str:
    """From the page of `origin` to another one of the site; "" to itself."""
    return "" if page == origin else f"{posixpath.relpath(page, posixpath.dirname(origin))}.html"


def link(file: str, name: str, origin: str) -> str:
    """To a function of a file; to what is around it if it is within another one."""
    return f'<a href="{to(file, origin)}#{outermost(file, name)}"><code>{name or Path(file).name}</code></a>'


def outermost(file: str, name: str) -> str:
    """The function or class itself, or around it, that is not within a function."""
    while name and name not in defined_in(file):
        name = name.rpartition(".")[0]
    return name


def with_links(text: str, origin: str) -> str:
    """Prose as HTML: notes as links, what is in backticks as code."""

    def linked(found: re.Match[str]) -> str:
        note = html.unescape(found[0])
        return (
            f'<a href="{to(notes()[note], origin)}#{id_of(note)}">{found[0]}</a>' if note in notes() else found[0]
        )

    return re.sub(r"`([^`]+)`", r"<code>\1</code>", NOTE.sub(linked, html.escape(text)))
