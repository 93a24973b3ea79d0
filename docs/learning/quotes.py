"""What the pages of this folder quote: outputs of commands, code and figures. The library cog fills them in.

A quoted block stands between two comments. The first one holds the call that prints the block:

    <!-- [[[cog output("python -m docs.learning plan") ]]] -->
    ...
    <!-- [[[end]]] -->

`fill` calls all of them and replaces what stands in between. A test lets cog do the same and compare (`--check`).
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

from cogapp import Cog

from docs.definitions import definitions
from docs.learning import lessons, recorded

__all__ = ["code", "figures", "machine", "output", "statement"]  # what a page can call

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
OURS = ["python", "-m", "docs.learning"]
PROLOGUE = f"from {__name__} import *"
BLOCK = re.compile(r"^<!-- \[\[\[cog (?P<call>.*) \]\]\] -->\n(?P<shown>(?:.*\n)*?)<!-- \[\[\[end\]\]\] -->$", re.M)


def pages() -> list[Path]:
    return sorted(FOLDER.glob("*.md"))


def run_cog(*options: str) -> int:
    """Run cog with the functions of this module at hand; its exit status, 0 if all went well."""
    return Cog().main(["cog", "-P", "-p", PROLOGUE, "--verbosity=1", *options])


def fill() -> int:
    """Renew what all pages quote, the one to explore too."""
    from docs.learning import explore  # which quotes by this module

    explore.PAGE.write_text(explore.build(), encoding="utf-8")
    return run_cog("-r", *map(str, pages()))


def blocks(text: str) -> dict[str, str]:
    """What a page shows now, by the call that prints it."""
    return {match["call"]: match["shown"] for match in BLOCK.finditer(text)}


# ------------------------------------------------------------------ called by the pages


def output(command: str) -> None:
    """A command, and what it prints."""
    print(f"```console\n$ {command}\n{printed_by(command)}```")


def code(path: str, name: str) -> None:
    """A function or class of a file, without its docstrings."""
    print(f"```python\n{source_of(ROOT / path, name)}```")


def statement(path: str, name: str, beginning: str) -> None:
    """One statement of a function, the one that begins like this."""
    print(f"```python\n{statement_of(ROOT / path, name, beginning)}```")


def figures(step: str) -> None:
    """The times of a recorded step, in a line."""
    print(f"*{recorded.figures(step)}*")


def machine() -> None:
    """The machine on which the steps were recorded."""
    print(f"The steps were recorded on: {recorded.machine()}.")


# ------------------------------------------------------------------ outputs


def lesson_in(command: str) -> str | None:
    """The lesson that a command shows, if that is what it does."""
    *program, name = shlex.split(command)
    return name if program == OURS and name in lessons.LESSONS else None


def printed_by(command: str) -> str:
    """What a Python command prints, run by this interpreter in the repository.

    Raises:
        ValueError: it is not a command of Python.
    """
    if shlex.split(command) == OURS:
        return lessons.listing() + "\n"
    name = lesson_in(command)
    if name is not None:
        return lessons.run(lessons.LESSONS[name]) + "\n"
    program, *arguments = shlex.split(command)
    if program != "python":
        raise ValueError(f"`{command}` is on a page, but only commands of `python` can be run to renew it.")
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


# ------------------------------------------------------------------ code


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


def statement_of(path: Path, name: str, beginning: str) -> str:
    """
    Raises:
        LookupError: the function is not there, or has no such statement, or more than one.
    """
    text = path.read_text()
    lines = text.splitlines()
    found = {
        node.lineno: node.end_lineno
        for node in ast.walk(definitions(text).get(name, ast.Pass()))
        if isinstance(node, ast.stmt)
        and hasattr(node, "lineno")
        and lines[node.lineno - 1].strip().startswith(beginning)
    }
    if len(found) != 1:
        raise LookupError(f"{path.relative_to(ROOT)}: `{name}` has {len(found)} statements `{beginning}...`.")
    [(first, last)] = found.items()
    return textwrap.dedent("\n".join(lines[first - 1 : last])) + "\n"


def _docstring(node: ast.stmt, lines: list[str]) -> range:
    """The numbers of its lines, and of the empty one behind it."""
    last = node.end_lineno or node.lineno
    return range(node.lineno, last + (2 if lines[last : last + 1] == [""] else 1))
