"""The rules of the project that a test can check: which module imports which, and what importing does."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "minddp"
UPPER_FLOORS = ("__init__", "train", "tasks", "demo", "cli", "__main__", "xray", "compat", "doctor", "bench")
CORE = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).parts[0].removesuffix(".py") not in UPPER_FLOORS
)

# Which packages each package may import besides itself. `ddp.py`, `strategies.py` and UPPER_FLOORS may import all.
MAY_IMPORT = {
    "platform": set(),
    "transport": {"platform"},
    "core": {"platform", "transport.protocols"},
    "expectation": {"platform", "core", "transport.protocols"},
    "acceleration": {"platform", "core"},
    "options": set(),
    "replicas": {"platform", "options", "core", "transport.protocols"},
    "modes": {"platform", "options", "core", "replicas", "transport.protocols"},
    "comm_hooks": {"platform", "core", "transport.protocols"},
    "watchdog": {"platform", "core", "forecast", "transport.protocols"},
    "elastic": {"platform", "core", "replicas", "watchdog", "transport.protocols"},
    "forecast": {"platform", "core", "transport.protocols"},
}


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


@pytest.mark.parametrize("path", CORE, ids=module_name)
def test_the_core_never_imports_upper_floors(path: Path) -> None:
    upper = tuple(f"minddp.{name}" for name in UPPER_FLOORS)
    offenders = [name for name in imports_of(path) if name.startswith(upper)]
    assert offenders == []


@pytest.mark.parametrize("path", CORE, ids=module_name)
def test_packages_import_only_what_they_may(path: Path) -> None:
    package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if package in ("__init__", "ddp", "strategies"):
        return
    allowed = {package, *MAY_IMPORT[package]}
    for name in imports_of(path):
        short = name.removeprefix("minddp.")
        if name.startswith("minddp."):
            assert any(short == one or short.startswith(f"{one}.") for one in allowed), f"{path} imports {name}"


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
    """At module level: definitions, imports, constants. No loops, no bare calls, no `global` anywhere."""
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for path in CORE:
        if path.name == "__main__.py":  # run by `python -m`, imported by no module
            continue
        tree = ast.parse(path.read_text())
        for node in tree.body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            typing_only = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
            assert isinstance(node, allowed) or docstring or typing_only, f"{path.name}:{node.lineno}"
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), path.name


def test_importing_minddp_has_no_side_effects() -> None:
    """No process group, no threads setting, no random numbers drawn, no command-line libraries."""
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
assert not {name for name in sys.modules if name.startswith(("minddp.train", "minddp.cli"))}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", CORE, ids=module_name)
def test_every_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))
