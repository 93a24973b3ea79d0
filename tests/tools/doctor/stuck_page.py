"""The functions that docs/stuck.md calls for its outputs. Cog fills them in, within some minutes:

    python -m cogapp -r -P docs/stuck.md

The blocks are marked as those of docs/learning; see `docs/learning/quotes.py`.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.tools.watchdog import time_to_diagnosis
from tests.tools.watchdog.harness import DOCS
from tests.tools.watchdog.time_to_diagnosis import play

PAGE = DOCS / "stuck.md"
_WHILE_WRAPPING = "idle, backward 0;"  # reports of a machine that is slow to start, not of the scenario


# ------------------------------------------------------------------ called by the page


def played(name: str) -> None:
    """The last report and the error of a waiting rank in a scenario of `tests/tools/watchdog/stuck.py`."""
    print(f"```text\n{excerpt(play(name))}```")


def timed() -> None:
    """The table of `tests/tools/watchdog/time_to_diagnosis.py`."""
    time_to_diagnosis.main()


def ran(command: str) -> None:
    """The output of a shell command."""
    print(f"```text\n{printed_by(command)}```")


# ------------------------------------------------------------------ outputs


def excerpt(outcome_of_rank: Mapping[int, str]) -> str:
    """The last warning of any rank, and the error of the first rank that got stuck, if there is one."""
    stuck = [output for _, output in sorted(outcome_of_rank.items()) if output.startswith("Stuck: ")]
    reports = [report for output in outcome_of_rank.values() for report in output.split("\nWaited for ")[1:]]
    warnings = [text for text in reports if _WHILE_WRAPPING not in text]
    last = sorted(warnings, key=lambda text: int(text.split()[0]))[-1:]
    shown = [f"Waited for {text.rstrip()}" for text in last] + [
        text.partition("\nreports:")[0] for text in stuck[:1]
    ]
    if not shown:
        raise RuntimeError(f"No rank got stuck: {dict(outcome_of_rank)}")
    return anonymous("\n\n".join(shown)) + "\n"


def printed_by(command: str) -> str:
    """The standard output of a shell command in which `minddp` is the one of this interpreter."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, shell=True, env=environment, stdout=subprocess.PIPE, text=True, timeout=200)
    return "".join(f"{line.rstrip()}\n" for line in anonymous(done.stdout).splitlines())


def anonymous(output: str) -> str:
    """Without the name of this host, and without the folders in which torch was built."""
    named = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node1", output)
    return re.sub(r"(\[|at )/\S+/third_party/gloo/", r"\1", named)
