"""`python -m reference.exercises DIR`: the rungs with the bodies left out, one file each, to be written yourself.

The bodies of all functions are left out, but not those of `__init__`: they say what state there is. The rungs below
are imported as they are. Solve them in the order of their numbers. Rungs of DDP are graded; the others are counted
and compared with the oracle, beside the rungs. The solution is the rung.
"""

from __future__ import annotations

import ast
from pathlib import Path

import tyro

from .ladder import RUNGS, rungs


def without_bodies(source: str) -> str:
    """`source`, in which every function but `__init__` has its docstring, and raises `NotImplementedError`."""
    lines = source.splitlines(keepends=True)
    bodies = [node.body for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Module | ast.ClassDef)]
    functions = [node for body in bodies for node in body if isinstance(node, ast.FunctionDef)]
    for node in sorted(functions, key=lambda node: -node.lineno):
        if node.name != "__init__":
            docstring = ast.get_docstring(node) is not None
            begin = node.body[0].end_lineno if docstring else node.body[0].lineno - 1
            indent = " " * node.body[0].col_offset
            lines[begin : node.end_lineno] = [f'{indent}raise NotImplementedError("{node.name}: yours to write")\n']
    return "".join(lines)


def main(folder: tyro.conf.Positional[Path]) -> None:
    """Write the exercises.

    Args:
        folder: where to; files of the same name are not overwritten.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, rung in enumerate(RUNGS):
        path = folder / f"{number}_{rung}.py"
        if path.exists():
            raise SystemExit(f"{path} exists. Nothing is overwritten: choose an empty folder.")
        source = Path(__file__).with_name(f"{rung}.py").read_text()
        path.write_text(without_bodies(source.replace("\nfrom .", f"\nfrom {__package__}.")))
        *_, rung_class = (node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
        program = f"{__package__}.grade" if rung in rungs(0) else f"{__package__} --yours"
        print(f"python -m {program} {path}:{rung_class}")


if __name__ == "__main__":
    tyro.cli(main)
