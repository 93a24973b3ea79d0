"""Make an environment for each torch and Python, run the core of the suite in it, and renew docs/versions.md.

    python -m tests.matrix --torch 2.13 2.15 --python 3.11
    python -m tests.matrix --use some/environment       # one that exists: its torch and Python

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
from pathlib import Path

from tests.matrix.table import Row, row_of, update

ROOT = Path(__file__).parents[2]
TORCHES = ("2.15", "2.14", "2.13", "2.12", "2.11")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
CORE = (
    "core",
    "expectation",
    "modes",
    "comm_hooks",
    "replicas",
    "surface",
    "parity",
    "mid_training",
    "transport",
)
NEEDS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
VERSIONS = "import sys, torch; print(torch.__version__, '%d.%d' % sys.version_info[:2])"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="*", default=TORCHES)
    parser.add_argument("--python", nargs="*", default=PYTHONS)
    parser.add_argument("--use", nargs="*", default=(), type=Path, help="environments instead of new ones")
    parser.add_argument("--only", nargs="*", default=CORE, help="folders of tests/")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="for each environment's tests")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "versions.md")
    args = parser.parse_args()
    rows = []
    for environment in args.use:
        rows.append(tested(environment, args.only, args.limit_s))
        update(args.page, rows)
    for python in () if args.use else args.python:
        for torch in args.torch:
            made = environment_of(torch, python)
            rows.append(tested(made, args.only, args.limit_s) if isinstance(made, Path) else made)
            update(args.page, rows)
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


def tested(environment: Path, folders: list[str], limit_s: float) -> Row:
    """Run these folders' fast tests in it, with this checkout's minddp."""
    python = environment.absolute() / "bin" / "python"
    torch, version = subprocess.check_output([python, "-c", VERSIONS], text=True).split()
    command = [python, "-m", "pytest", "-q", "-n2", "--dist", "loadfile", "-m", "not slow"]
    command += [f"tests/{folder}" for folder in folders]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    print(f"torch {torch}, Python {version}: {' '.join(folders)}", file=sys.stderr)
    try:
        done = subprocess.run(command, cwd=ROOT, env=environ, text=True, timeout=limit_s, stdout=subprocess.PIPE)
    except subprocess.TimeoutExpired:
        return not_run(torch, version, f"the tests took more than {limit_s:.0f} s")
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / f"matrix-{torch}-{version}.txt").write_text(done.stdout)
    only = () if set(folders) == set(CORE) else tuple(folders)
    return row_of(torch, version, today(), done.stdout, only)


def today() -> str:
    return datetime.date.today().isoformat()


if __name__ == "__main__":
    sys.exit(main())
