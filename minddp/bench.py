"""`minddp bench`: runs the benchmarks that lie beside this package in its repository.

They are not installed with it, as they also measure the reference ladder and need what users do not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str], repository: Path = REPOSITORY) -> int:
    """Run `python -m benchmarks` with `arguments`; returns its exit status."""
    if not (repository / "benchmarks" / "__main__.py").is_file():
        print(
            f"minddp bench: there are no benchmarks in {repository}. They are a part of minddp's repository that "
            "is not installed: run this command from a clone of it, set up with `make venv`.",
            file=sys.stderr,
        )
        return 1
    path = os.pathsep.join(filter(None, [str(repository), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode
