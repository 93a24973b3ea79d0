"""`minddp bench`: runs the benchmarks that lie beside this package, in its repository or installed with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: As `python -m benchmarks`, but a folder "benchmarks" where the user stands is not taken for ours.
PROGRAM = "import sys; sys.path.append(sys.path.pop(0)); from benchmarks.__main__ import main; main(sys.argv[1:])"


def main(arguments: Sequence[str]) -> int:
    """Run `python -m benchmarks` with `arguments`; returns its exit status. `--on-cpu` is where they run anyway."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", PROGRAM, *(each for each in arguments if each != "--on-cpu")]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode
