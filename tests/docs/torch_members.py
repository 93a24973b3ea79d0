"""What torch's DDP consists of, by name: read from the C++ headers in its wheel, and from its wrapper's source.

The headers are read as text: comments and bodies are dropped, and what is left of a class is cut at the semicolons.
That is enough for these few headers, and no parser of C++. Members are named `name()` if they are functions.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

INSTALLED = Path(torch.__file__).parent
RECORDS = {path.stem: path for path in (Path(__file__).parent / "torch_versions").glob("*.json")}
HEADERS = "include/torch/csrc/distributed/c10d"
DDP = ["reducer.hpp", "reducer_timer.hpp", "logger.hpp"]
HOOKS = ["comm.hpp", "default_comm_hooks.hpp", "python_comm_hook.h"]
WRAPPER = "nn/parallel/distributed.py"
FREE = "functions"  # of a header, outside of classes
_CLASS = re.compile(r"(?<!enum )\b(?:class|struct)\s+(?:TORCH\w*_API\s+)?(\w+)(?:\s*:[^;{]*)?\s*\{")
_NOT_MEMBERS = re.compile(
    r"^\s*(class|struct)\b|\b(using|friend|static_assert|operator|namespace|enum|typedef|TORCH_DECLARE\w*)\b"
)


def members_of(torch_folder: Path) -> dict[str, set[str]]:
    """The members of each class in an installed torch, by `Class` or `Outer::Inner`."""
    headers = (in_header((torch_folder / HEADERS / name).read_text()) for name in (*DDP, *HOOKS))
    found: dict[str, set[str]] = {}
    for members in (*headers, in_module((torch_folder / WRAPPER).read_text())):
        for owner, names in members.items():
            found.setdefault(owner, set()).update(names)
    return found


def read_record(version: str) -> dict[str, set[str]]:
    return {owner: set(names.split()) for owner, names in json.loads(RECORDS[version].read_text()).items()}


def record(members: dict[str, set[str]], path: Path) -> None:
    lines = [f"  {json.dumps(owner)}: {json.dumps(' '.join(sorted(members[owner])))}" for owner in sorted(members)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _by_owner(pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for owner, member in pairs:
        found.setdefault(owner, set()).add(member)
    return found


# ------------------------------------------------------------------ C++


def in_header(text: str) -> dict[str, set[str]]:
    text = re.sub(r"/\*.*?\*/", "", re.sub(r"//.*|^\s*#.*", "", text, flags=re.M), flags=re.S)
    text = re.sub(r"\bnamespace [\w:]+ \{|\btemplate <[^>]*>", "", text)
    return _by_owner(_members_in(text, ""))


def _members_in(body: str, owner: str) -> Iterator[tuple[str, str]]:
    """Of a class, or of a whole header; classes in it first, then what is left of it."""
    while (found := _CLASS.search(body)) is not None:
        end = _end_of_block(body, found.end())
        inner = f"{owner}::{found[1]}" if owner else found[1]
        yield from _members_in(body[found.end() : end], inner)
        body = body[: found.start()] + body[end + 1 :]
    for statement in _statements(body):
        if (member := _declared_by(statement)) is not None:
            yield owner or FREE, member


def _end_of_block(text: str, start: int) -> int:
    """Where the brace closes that was opened before `start`."""
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return len(text)


def _statements(body: str) -> Iterator[str]:
    """What stands between semicolons; a block counts as one, except within parentheses."""
    start = place = parentheses = 0
    while place < len(body):
        char = body[place]
        parentheses += {"(": 1, ")": -1}.get(char, 0)
        if char == "{" and not parentheses:
            yield body[start:place]
            place = start = _end_of_block(body, place + 1)
            start += 1
        elif char == ";" and not parentheses:
            yield body[start:place]
            start = place + 1
        place += 1


def _declared_by(statement: str) -> str | None:
    statement = re.sub(r"\b(?:public|protected|private):", "", statement)
    while (shorter := re.sub(r"<[^<>]*>", "", statement)) != statement:  # arguments of templates
        statement = shorter
    if not statement.strip() or _NOT_MEMBERS.search(statement):
        return None
    function = re.search(r"(~?\w+)\s*\(", statement)
    if function is not None:
        return f"{function[1]}()"
    field = re.search(r"(\w+)\s*(?:=.*)?$", statement.strip(), re.S)
    return field[1] if field is not None and " " in statement.strip() else None


# ------------------------------------------------------------------ Python


def in_module(text: str) -> dict[str, set[str]]:
    return _by_owner(_members_of_module(text))


def _members_of_module(text: str) -> Iterator[tuple[str, str]]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            yield WRAPPER, f"{node.name}()"
        elif isinstance(node, ast.ClassDef):
            yield node.name, node.name
            yield from ((node.name, f"{part.name}()") for part in node.body if isinstance(part, ast.FunctionDef))


if __name__ == "__main__":
    version = ".".join(torch.__version__.split(".")[:2])
    record(members_of(INSTALLED), Path(__file__).parent / "torch_versions" / f"{version}.json")
