"""Make an environment for each torch and Python, run the core of the suite in it, and renew docs/versions.md.

    python -m tests.matrix --torch 2.13 2.15 --python 3.11
    python -m tests.matrix --use some/environment       # one that exists: its torch and Python
    python -m tests.matrix --frameworks                 # tests/compat, slow ones too, with the frameworks' packages

Environments stay in build/matrix and are used again. What cannot be had (no such interpreter, no wheel) is a row
that says so.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.matrix.table import HEADER, WITH_FRAMEWORKS, Row, row_of, update

ROOT = Path(__file__).parents[2]
TORCHES = ("2.15", "2.14", "2.13", "2.12", "2.11")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
CORE = (
    "core",
    "modes",
    "comm_hooks",
    "replicas",
    "surface",
    "parity",
    "mid_training",
    "transport",
)
NEEDS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
FRAMEWORKS = ("accelerate", "pytorch-lightning", "transformers", "torchft")
OF_THEIR_TESTS = ("parameterized",)  # torchft's wheel has its tests, and does not ask for this
VERSIONS = "import sys, torch; print(torch.__version__, '%d.%d' % sys.version_info[:2])"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="*", default=TORCHES)
    parser.add_argument("--python", nargs="*", default=PYTHONS)
    parser.add_argument("--use", nargs="*", default=(), type=Path, help="environments instead of new ones")
    parser.add_argument("--only", nargs="*", default=CORE, help="folders of tests/")
    parser.add_argument("--frameworks", action="store_true", help="tests/compat in full, in a table of its own")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="for each environment's tests")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "versions.md")
    args = parser.parse_args()
    header = WITH_FRAMEWORKS if args.frameworks else HEADER
    rows = []
    for made in args.use or (environment_of(torch, python) for python in args.python for torch in args.torch):
        if isinstance(made, Row):
            rows.append(made)
        elif args.frameworks:
            rows.append(tested_with_frameworks(made, args.limit_s))
        else:
            rows.append(tested(made, args.only, args.limit_s))
        update(args.page, rows, header)
    print(*rows, sep="\n")
    return 0 if all(not row.failed for row in rows) else 1


def environment_of(torch: str, python: str) -> Path | Row:
    """A virtual environment with these versions, or a row that says why there is none."""
    where = ROOT / "build" / "matrix" / f"torch{torch}-python{python}"
    interpreter = shutil.which(f"python{python}")
    if interpreter is None or subprocess.run([interpreter, "-c", ""], capture_output=True).returncode:
        return not_run(torch, python, "no such interpreter")
    if not (where / "ready").exists():
        shutil.rmtree(where, ignore_errors=True)
        subprocess.run([interpreter, "-m", "venv", where], check=True)
        packages = [f"torch=={torch}.*", *NEEDS, "-e", str(ROOT)]
        done = subprocess.run(
            [where / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            shutil.rmtree(where)
            return not_run(torch, python, (done.stderr.strip().splitlines() or ["pip failed"])[-1].strip())
        (where / "ready").touch()
    return where


def not_run(torch: str, python: str, reason: str) -> Row:
    return Row(torch, python, today(), {}, reason=reason)


def tested(environment: Path, folders: Sequence[str], limit_s: float) -> Row:
    """Run these folders' fast tests in it, with this checkout's minddp."""
    only = () if set(folders) == set(CORE) else tuple(folders)
    return ran(environment, ["--dist", "loadfile", "-m", "not slow", *_paths(folders)], limit_s, only=only)


def tested_with_frameworks(environment: Path, limit_s: float) -> Row:
    """Install the frameworks in it, as far as they can be had, and run all tests of compatibility."""
    pip = [environment / "bin" / "pip", "--disable-pip-version-check"]
    for name in (*FRAMEWORKS, *OF_THEIR_TESTS):
        subprocess.run([*pip, "install", "--quiet", name], check=False)
    shown = subprocess.check_output([*pip, "list", "--format=freeze"], text=True).splitlines()
    packages = tuple(line.replace("==", " ") for line in shown if line.partition("==")[0] in FRAMEWORKS)
    marks = ["--dist", "loadfile", "-m", "slow or not slow", *_paths(["compat"])]
    return ran(environment, marks, limit_s, packages=packages)


def _paths(folders: Sequence[str]) -> list[str]:
    return [f"tests/{folder}" for folder in folders]


def ran(environment: Path, arguments: Sequence[str], limit_s: float, **more: tuple[str, ...]) -> Row:
    """What pytest with these arguments comes to in it."""
    python = environment.absolute() / "bin" / "python"
    torch, version = subprocess.check_output([python, "-c", VERSIONS], text=True).split()
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    print(f"torch {torch}, Python {version}: {' '.join(arguments)}", file=sys.stderr)
    command = [python, "-m", "pytest", "-q", "-n2", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environ, text=True, timeout=limit_s, stdout=subprocess.PIPE)
    except subprocess.TimeoutExpired:
        return not_run(torch, version, f"the tests took more than {limit_s:.0f} s")
    (ROOT / "build").mkdir(exist_ok=True)
    kind = "frameworks" if "packages" in more else "matrix"
    (ROOT / "build" / f"{kind}-{torch}-{version}.txt").write_text(done.stdout)
    return row_of(torch, version, today(), done.stdout, **more)


def today() -> str:
    return datetime.date.today().isoformat()


if __name__ == "__main__":
    sys.exit(main())
