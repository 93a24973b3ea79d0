"""minddp as a user starts it in a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
PATIENCE_S = 240.0  # six processes import torch, perhaps on a busy machine


def start(
    *words: str, launcher: Sequence[str] = (sys.executable,), cwd: Path = ROOT, **variables: str
) -> subprocess.Popen[str]:
    """`minddp` with these words and environment variables, in a session of its own, like a terminal's."""
    return subprocess.Popen(
        [*launcher, "-m", "minddp", *words],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end_of(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        output, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def minddp(*words: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """The end of it; the ranks' output is the command's."""
    return end_of(start(*words, cwd=cwd, **variables))
