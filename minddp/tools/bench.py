"""`minddp bench`: run the benchmarks, of the repository or as they are installed with the package (setup.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
# Like `python -m benchmarks`, but a folder "benchmarks" in the current directory does not take precedence.
PROGRAM = "import sys; sys.path.append(sys.path.pop(0)); from benchmarks.__main__ import main; main(sys.argv[1:])"


def main(arguments: Sequence[str]) -> int:
    """Run `python -m benchmarks` and return its status."""
    installed = PACKAGE / "beside"
    place = installed if installed.is_dir() else PACKAGE.parent
    path = os.pathsep.join(filter(None, [str(place), str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], env={**os.environ, "PYTHONPATH": path}, check=False
    ).returncode
