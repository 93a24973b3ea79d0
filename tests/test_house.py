"""The rules of the project that a test can check: which module imports which, and what importing does."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.processes import ROOT, python

PACKAGE = ROOT / "minddp"
LOWER_STOREY = {  # the wrapper: which rooms each one may import besides itself. Two files may import all of them.
    "ddp": None,
    "strategies": None,
    "platform": set(),
    "transport": {"platform"},
    "core": {"platform", "transport.protocols"},
    "options": set(),
    "extension": {"core", "transport.protocols", "ddp"},
    "replicas": {"platform", "options", "core", "transport.protocols"},
    "modes": {"platform", "options", "core", "replicas", "transport.protocols"},
    "comm_hooks": {"platform", "core", "transport.protocols"},
    "compat": {"platform", "options", "core", "replicas", "comm_hooks", "ddp"},
}
TOOLS = {  # which other tools each one may import, besides all of the wrapper
    "job": set(),
    "forecast": set(),
    "watchdog": {"forecast"},
    "elastic": {"job", "watchdog"},
    "doctor": {"job", "forecast"},
    "launch": {"job", "train.settings"},
    "xray": {"forecast"},
    "audit": {"watchdog", "xray"},
    "train": {"job", "watchdog", "elastic", "xray"},
    "tasks": {"train"},
    "demo": {"job", "train"},
    "bench": set(),
    "wrapper": {"forecast", "watchdog", "elastic"},
}
PATHS = sorted(PACKAGE.rglob("*.py"))
LOWER = [path for path in PATHS if path.relative_to(PACKAGE).parts[0].removesuffix(".py") in LOWER_STOREY]
UPPER = [path for path in PATHS if path.is_relative_to(PACKAGE / "tools") and path.parent.name != "startup"]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names of all imports, also those within functions; `from a import b` gives both a and a.b."""
    package = module_name(path).split(".") if path.stem == "__init__" else module_name(path).split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def rooms_imported(path: Path) -> Iterator[str]:
    """As in the tables above; `minddp` itself has no code to import, only names that it passes on."""
    for name in imports_of(path):
        if name.startswith("minddp."):
            yield name.removeprefix("minddp.")


def offenders(path: Path, room: str, allowed: set[str], names: Iterable[str]) -> list[str]:
    return [name for name in names if not any(f"{name}.".startswith(f"{one}.") for one in (room, *allowed))]


def test_every_file_is_on_a_storey() -> None:
    others = {path.relative_to(PACKAGE).as_posix() for path in PATHS if path not in LOWER + UPPER}
    facades = {"__init__.py", "__main__.py", "cli.py", "elastic.py", "xray.py"}
    assert others == {*facades, "tools/launch/startup/sitecustomize.py"}


@pytest.mark.parametrize("path", LOWER, ids=module_name)
def test_no_room_below_imports_one_above(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    allowed = LOWER_STOREY[room]
    everything = set(LOWER_STOREY)
    assert offenders(path, room, everything if allowed is None else allowed, rooms_imported(path)) == []


@pytest.mark.parametrize("path", UPPER, ids=module_name)
def test_tools_import_only_what_they_may(path: Path) -> None:
    room = path.relative_to(PACKAGE / "tools").parts[0].removesuffix(".py")
    names = [name.removeprefix("tools.") for name in rooms_imported(path) if name.startswith("tools.")]
    assert room == "__init__" or offenders(path, room, TOOLS[room], names) == []


def test_minddp_and_reference_do_not_import_each_other() -> None:
    for package, stranger in (("minddp", "reference"), ("reference", "minddp")):
        for path in sorted((ROOT / package).rglob("*.py")):
            names = [name.split(".")[0] for name in imports_of(path)]
            assert stranger not in names, f"{path.relative_to(ROOT)} imports {stranger}"


def test_nothing_in_the_package_imports_tests_or_benchmarks() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        heads = {name.split(".")[0] for name in imports_of(path)}
        assert not heads & {"tests", "benchmarks"}, path


def test_no_module_of_the_core_calls_anything_when_imported_that_it_need_not() -> None:
    """At module level: definitions, imports, constants. No loops, no bare calls, no `global` anywhere.

    But `import minddp` registers the backend, as packages with a backend of torch.distributed do.
    """
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for path in LOWER + UPPER:
        if path.name == "__main__.py":  # run by `python -m`, imported by no module
            continue
        tree = ast.parse(path.read_text())
        for node in tree.body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            typing_only = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
            registers = path == ROOT / "minddp/__init__.py" and "register()" in ast.unparse(node)
            assert isinstance(node, allowed) or docstring or typing_only or registers, f"{path.name}:{node.lineno}"
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), path.name


def test_importing_minddp_has_no_side_effects() -> None:
    """No process group, no threads setting, no random numbers drawn, no command-line libraries. The code that
    installs it in torch's place is imported at its first use."""
    program = """
import sys, threading, torch, torch.distributed as dist
from torch.optim import optimizer
before = (torch.get_num_threads(), torch.get_rng_state().tolist(), threading.active_count(),
          torch.get_default_dtype(), len(optimizer._global_optimizer_pre_hooks))
had = set(sys.modules)
import minddp
after = (torch.get_num_threads(), torch.get_rng_state().tolist(), threading.active_count(),
         torch.get_default_dtype(), len(optimizer._global_optimizer_pre_hooks))
assert before == after
assert not dist.is_initialized()
new = {name.split(".")[0] for name in set(sys.modules) - had}
assert not new & {"rich", "tyro", "sklearn", "matplotlib", "cupy", "pytest", "reference"}, new
rare = ["minddp." + name for name in "cli compat.install tools.train tools.launch.run tools.launch.execute".split()]
assert not {name for name in sys.modules if name.startswith(tuple(rare))}
assert minddp.register.__module__ == "minddp.compat.install"
try:
    minddp.nonsense
except AttributeError as error:
    assert "nonsense" in str(error)
else:
    raise AssertionError
"""
    python("-c", program)


@pytest.mark.parametrize("path", LOWER + UPPER, ids=module_name)
def test_every_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_no_class_name_stands_twice_in_the_package() -> None:
    """A reader who searches for a name finds one class. The wrapper's own name is that of three classes."""
    names = [
        node.name for path in PATHS for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
    ]
    assert {name for name in names if names.count(name) > 1} == {"DistributedDataParallel"}
