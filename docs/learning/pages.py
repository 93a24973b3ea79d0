"""What a page quotes, and whether it is still true.

Four things on a page are not written by hand, or checked if they are:

- a block of kind `console`: its first line is a command, the rest is what the command prints;
- a block of kind `python` after `<!-- code: FILE NAME -->`: the source of a function or class, without docstrings
  (the page says `fmt: off`, or ruff would format what is quoted);
- a figure before `<!-- NAME -->`: one of `recorded.facts()`;
- a link whose text is code, to a Python file: the file defines that name.

`fill` renews the first three in all pages. The tests do the same and compare.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from docs.learning import recorded
from docs.learning.lessons import LESSONS, Lesson, listing, run

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
OURS = ["python", "-m", "docs.learning"]

_CONSOLE = re.compile(r"^```console\n\$ (.+)\n((?:.*\n)*?)```$", re.MULTILINE)
_CODE = re.compile(r"^<!-- code: (\S+) (\S+) -->\n```python\n((?:.*\n)*?)```$", re.MULTILINE)
_FIGURE = re.compile(r"(?P<shown>[\d.,]+(?: ?ms|%)?|`[^`]*`)<!-- (?P<name>[\w.]+) -->")
_LINK = re.compile(r"(?<!!)\[(?P<text>`[^`]+`|[^\]]+)\]\((?P<target>[^)#\s]*)(?:#(?P<anchor>[^)]+))?\)")
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")


def pages() -> list[Path]:
    return sorted(FOLDER.glob("*.md"))


def fill() -> None:
    """Renew in all pages whatever comes from commands, code and recordings."""
    for page in pages():
        text = page.read_text()
        renewed = with_figures(with_code(with_outputs(text, output_of)), recorded.facts())
        if renewed != text:
            page.write_text(renewed)
            print(f"{page.name} has changed")


# ------------------------------------------------------------------ outputs


def outputs(text: str) -> dict[str, str]:
    """The outputs that a page shows, by command."""
    return dict(_CONSOLE.findall(text))


def with_outputs(text: str, output_of: Callable[[str], str]) -> str:
    return _CONSOLE.sub(lambda block: f"```console\n$ {block[1]}\n{output_of(block[1])}```", text)


def output_of(command: str, run_lesson: Callable[[Lesson], str] = run) -> str:
    """What a command prints, run anew."""
    if shlex.split(command) == OURS:
        return listing() + "\n"
    name = lesson_in(command)
    return printed_by(command) if name is None else run_lesson(LESSONS[name]) + "\n"


def lesson_in(command: str) -> str | None:
    """The lesson that a command shows, if that is what it does."""
    *program, name = shlex.split(command)
    return name if program == OURS and name in LESSONS else None


def printed_by(command: str) -> str:
    """What a Python command prints, run by this interpreter in the repository."""
    program, *arguments = shlex.split(command)
    if program != "python":
        raise ValueError(f"`{command}` is on a page, but only commands of `python` can be run to renew it.")
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


# ------------------------------------------------------------------ code


def with_code(text: str) -> str:
    return _CODE.sub(lambda b: f"<!-- code: {b[1]} {b[2]} -->\n```python\n{source_of(ROOT / b[1], b[2])}```", text)


def source_of(path: Path, name: str) -> str:
    """A function or class as it stands in the file, without its docstrings.

    Raises:
        LookupError: the file does not define it.
    """
    text = path.read_text()
    node = definitions(text).get(name)
    if node is None:
        raise LookupError(f"{path.relative_to(ROOT)} does not define `{name}`.")
    lines = text.splitlines()
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    dropped = {
        number
        for inner in ast.walk(node)
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner) is not None
        for number in _docstring(inner.body[0], lines)
    }
    kept = [lines[number - 1] for number in range(first, (node.end_lineno or first) + 1) if number not in dropped]
    return textwrap.dedent("\n".join(kept)) + "\n"


def _docstring(node: ast.stmt, lines: list[str]) -> range:
    """The numbers of its lines, and of the empty one behind it."""
    last = node.end_lineno or node.lineno
    return range(node.lineno, last + (2 if lines[last : last + 1] == [""] else 1))


def definitions(text: str) -> dict[str, ast.stmt]:
    """What a module defines, by dotted name: functions, classes and what is in them, and what is assigned."""
    return dict(_defined_in(ast.parse(text).body, ""))


def _defined_in(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _defined_in(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((prefix + target.id, node) for target in targets if isinstance(target, ast.Name))


# ------------------------------------------------------------------ figures


def with_figures(text: str, facts: Mapping[str, str]) -> str:
    def figure(match: re.Match[str]) -> str:
        fact = facts[match["name"]]
        shown = f"`{fact}`" if match["shown"].startswith("`") else fact
        return f"{shown}<!-- {match['name']} -->"

    return _FIGURE.sub(figure, text)


# ------------------------------------------------------------------ links


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
    """Why a link does not lead where it says; `None` if it does, or leads out of the repository."""
    if link.target.startswith(("http:", "https:")):
        return None
    target = (page.parent / link.target).resolve() if link.target else page
    if not target.exists():
        return f"{link.target} does not exist"
    if link.anchor and link.anchor not in anchors(target.read_text()):
        return f"{link.target} has no heading #{link.anchor}"
    name = link.text.strip("`")
    if target.suffix != ".py" or name == link.text or name.endswith((".py", "/")):
        return None
    text = target.read_text()
    if name.startswith("[Note: "):
        return None if f"\n{name}\n" in text else f"{link.target} has no {name}"
    return None if name.removesuffix("()") in definitions(text) else f"{link.target} does not define {name}"


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
