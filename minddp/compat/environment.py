"""The environment in which each Python process installs minddp when it imports torch.

It differs from any other by one folder at the head of PYTHONPATH, whose `sitecustomize` does the rest. A process
that is started with `-I`, `-E` or `-S`, or with a PYTHONPATH of its own, escapes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

STARTUP_FOLDER = Path(__file__).parent / "startup"


def installing(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment`, so changed. Where PYTHONPATH is unset or empty no empty entry is added: it would mean `.`"""
    before = environment.get("PYTHONPATH", "")
    others = [folder for folder in before.split(os.pathsep) if folder != str(STARTUP_FOLDER)] if before else []
    return {**environment, "PYTHONPATH": os.pathsep.join([str(STARTUP_FOLDER), *others])}
