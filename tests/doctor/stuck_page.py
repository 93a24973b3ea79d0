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

from tests.watchdog.test_stuck import play

PAGE = Path(__file__).parent.parent.parent / "docs" / "stuck.md"
_WHILE_WRAPPING = "idle, backward 0;"  # reports of a machine that is slow to start, not of the scenario


# ------------------------------------------------------------------ called by the page


def played(name: str) -> None:
    """The last report and the error of a waiting rank in a scenario of `tests/watchdog/stuck.py`."""
    print(f"```text\n{excerpt(play(name))}```")


def ran(command: str) -> None:
    """The output of a shell command."""
    print(f"```text\n{printed_by(command)}```")


# ------------------------------------------------------------------ outputs


def excerpt(outcome_of_rank: Mapping[int, str]) -> str:
    """The last warning and the error of the first rank that got stuck; of rank 0, if all went on in the end."""
    stuck = [output for _, output in sorted(outcome_of_rank.items()) if output.startswith("Stuck: ")]
    ended, _, reports = (stuck or [outcome_of_rank[0]])[0].partition("\nreports:")
    warnings = [text for text in reports.split("\nWaited") if text and _WHILE_WRAPPING not in text]
    shown = [f"Waited{text.rstrip()}" for text in warnings[-1:]] + ([ended] if stuck else [])
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
    return re.sub(r"\[/\S+/third_party/gloo/", "[", named)
